"""Filling a table from the ``.pt`` files SimpleTuner wrote, in parallel, without trusting what they hold."""

from __future__ import annotations

import gzip
import io
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from simpletuner_gh200.cache.record import Record, Unrepresentable, encode
from simpletuner_gh200.cache.slots import key_of
from simpletuner_gh200.cache.source import source_of
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.telemetry.progress import Progress

logger = logging.getLogger("simpletuner_gh200")

SUFFIX = ".pt"
_GZIP = b"\x1f\x8b"


def cache_files(folder: str) -> Iterator[tuple[str, int]]:
    """(absolute path, size) of every cache file under ``folder``, links to folders followed once."""
    seen: set[tuple[int, int]] = set()
    waiting = [os.path.abspath(folder)]
    while waiting:
        current = waiting.pop()
        try:
            found = os.stat(current)
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            with os.scandir(current) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIX):
                        size = _size(entry)
                        if size is not None:
                            yield entry.path, size
                    elif entry.is_dir():
                        waiting.append(entry.path)
        except OSError as unreadable:
            if not isinstance(unreadable, FileNotFoundError):
                logger.warning("gh200: what is in %s is not held in memory: %s", current, unreadable)


def _size(entry: os.DirEntry[str]) -> int | None:
    """None for what is no file, a FIFO say, for one that went since it was listed, and for a link to nothing."""
    try:
        found = entry.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def load_file(path: str) -> Any:
    """What ``torch.load`` makes of a cache file, gzipped or not. Never unpickles arbitrary objects."""
    import torch

    with open(path, "rb") as file:
        start = file.read(2)
        if start == _GZIP:
            file.seek(0)
            return torch.load(io.BytesIO(gzip.decompress(file.read())), map_location="cpu", weights_only=True)
    if start == b"PK":
        # Mapped, so that the bytes are copied once: from the page cache into the segment.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)


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


def fill(
    table: Table,
    paths: Iterable[str],
    *,
    workers: int,
    progress: Progress | None = None,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Take in every path that the table admits and lacks. ``share`` (i, n): only the i-th of n parts of the keys."""
    started = time.perf_counter()
    part, parts = share

    def one(path: str) -> None:
        key = key_of(path)
        wanted = key.low % parts == part and table.admits(key) and table.control.slots.get(key) is None
        taken = wanted and take_in(table, path)
        if progress is not None:
            progress.advance(1, _size_of(path) if taken else 0)

    with ThreadPoolExecutor(max_workers=max(workers, 1), thread_name_prefix="gh200-fill") as pool:
        for _ in pool.map(one, paths):
            pass
    table.populate()
    table.statistics.fill_seconds += time.perf_counter() - started
