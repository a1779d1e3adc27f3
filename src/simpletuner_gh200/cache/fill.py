"""Filling a table from the ``.pt`` files SimpleTuner wrote, in parallel, without trusting what they hold."""

from __future__ import annotations

import gzip
import io
import os
import threading
import time
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from simpletuner_gh200.cache.batch_fill import BatchFiller
from simpletuner_gh200.cache.record import Record, Unrepresentable, encode
from simpletuner_gh200.cache.slots import keys_of
from simpletuner_gh200.cache.source import source_of
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.cache.tensor_files import Shapes
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.pace import AT_ONCE, Pace
from simpletuner_gh200.memory.regular_files import open_regular
from simpletuner_gh200.telemetry.progress import Progress

_GZIP = b"\x1f\x8b"


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def load_file(path: str) -> Any:
    """What ``torch.load`` makes of a cache file, gzipped or not. Never unpickles arbitrary objects.

    Raises where the checksums that the file carries don't fit: torch itself does not look at those of a zip file.
    """
    import torch

    content = read_file(path)
    if content.startswith(_GZIP):
        content = gzip.decompress(content)
    if content.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged} is damaged")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def read_file(path: str) -> bytes:
    """All of a cache file; OSError where it is none.

    Read, not mapped: where a disk fails, or somebody cuts a file short, reading is an error and a mapping the end.
    """
    with open(open_regular(path), "rb") as file:
        return file.read(os.fstat(file.fileno()).st_size)


def hold(table: Table, path: str, value: Any, source: tuple[int, int]) -> bool:
    """Publish ``value`` as the content of the file that looked like ``source``; False where it is not ours to hold."""
    record = _encoded(table, value)
    return record is not None and table.publish(path, record, source)


def _encoded(table: Table, value: Any) -> Record | None:
    try:
        return encode(value, look_for_nan=table.look_for_nan)
    except Unrepresentable as odd:
        table.statistics.fall_back(odd.reason)
        return None


def read_through(table: Table, path: str, load: Callable[[], Any]) -> Any:
    """SimpleTuner's own ``load``; what it returned is held for the next time, if the file stood still meanwhile."""
    before = source_of(path)
    value = load()
    if before is not None and source_of(path) == before:
        try:
            hold(table, path, value, before)
        except GH200Error as failed:  # it was read, so whoever asked gets it
            table.statistics.fall_back(f"not held: {type(failed).__name__}")
    return value


def take_in(table: Table, path: str, load: Callable[[str], Any] = load_file) -> bool:
    """Publish the content of ``path``; False where it is not ours to hold, which the statistics explain."""
    before = source_of(path)
    if before is None:
        return False
    try:
        record = _encoded(table, load(path))
    except Exception as failed:  # noqa: BLE001 - a file that doesn't load is upstream's to report; counted by kind
        table.statistics.fall_back(f"unreadable: {type(failed).__name__}")
        return False
    if record is None:
        return False
    if source_of(path) != before:
        table.statistics.fall_back("changed while it was read")
        return False
    return table.publish(path, record, before)


HANDED_OUT = 128
"""Paths that a filling thread asks for at a time: few enough that none is left alone with the last ones for long."""


def fill(
    table: Table,
    paths: Iterable[str],
    *,
    workers: int,
    progress: Progress | None = None,
    share: tuple[int, int] = (0, 1),
    pace: Pace = AT_ONCE,
) -> None:
    """Take in every path that the table admits and lacks. ``share`` (i, n): only the i-th of n parts of the keys.

    ``pace`` may slow it down, and end it early.
    """
    started = time.perf_counter()
    part, parts = share
    shapes = Shapes()
    waiting, handing_out = iter(paths), threading.Lock()

    def one_by_one(path: str) -> int:
        return _size_of(path) if take_in(table, path) else 0

    def thread() -> None:
        pace.begin()
        filler = BatchFiller(table, shapes, one_by_one)
        while not pace.ended:
            with handing_out:
                some = list(islice(waiting, HANDED_OUT))
            if not some:
                return
            keys = keys_of(some)
            wanted = table.lacks(keys) & (keys[:, 0] % np.uint64(parts) == part)
            lacking = [some[number] for number in np.flatnonzero(wanted).tolist()]
            keys = keys[wanted]
            if progress is not None:
                progress.advance(len(some) - len(lacking))
            while lacking and not pace.ended:
                done, size = filler.fill(lacking, keys)
                lacking, keys = lacking[done:], keys[done:]
                if progress is not None:
                    progress.advance(done, size)
                pace.rest(size)

    with ThreadPoolExecutor(max_workers=max(workers, 1), thread_name_prefix="gh200-fill") as pool:
        for finished in [pool.submit(thread) for _ in range(max(workers, 1))]:
            finished.result()
    if not pace.ended:
        table.populate()
    table.statistics.fill_seconds += time.perf_counter() - started
