"""Filling a cache from the ``.pt`` files SimpleTuner wrote: in parallel, into segments that appear as they are sealed.

Files are taken apart natively, in batches; what is not as torch usually writes it is loaded one by one, without
trusting what it holds.
"""

from __future__ import annotations

import gzip
import io
import logging
import os
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.held.bulk import CHANGED, GONE, REFUSED, TAKEN
from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.record import Unrepresentable, encode
from simpletuner_gh200.held.segment import (
    ALIGNMENT,
    FINITE,
    HEADER_SIZE,
    TENSORS,
    DamagedEntry,
    Segment,
    SegmentWriter,
    key_of,
    keys_of,
)
from simpletuner_gh200.held.tensor_files import MOST_FILES, MOST_SHAPES, FileTaker, Shapes, look_at
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.background import AT_ONCE, Pace
from simpletuner_gh200.memory.mapping import MAP_NOW, advise_pages, create_memfd
from simpletuner_gh200.memory.regular_files import open_regular
from simpletuner_gh200.telemetry.progress import Progress
from simpletuner_gh200.units import GIB, MIB, format_bytes

logger = logging.getLogger("simpletuner_gh200")

NOT_READ_NATIVELY = "read one by one"
"""Counted for each file that is not as torch usually writes it; what became of it is counted besides."""

SMALLEST, LARGEST = 64 * MIB, 4 * GIB
"""Sizes at which a segment is sealed: larger the more is held, so that there are few."""

HANDED_OUT = 128
"""Paths that a filling thread asks for at a time: few enough that none is left alone with the last ones for long."""

_GZIP = b"\x1f\x8b"


def load_file(path: str) -> Any:
    """What ``torch.load`` makes of a cache file, gzipped or not. Never unpickles arbitrary objects.

    Raises where the checksums that the file carries don't fit: torch itself does not look at those of a zip file.
    Read, not mapped: where a disk fails, or somebody cuts a file short, reading is an error and a mapping the end.
    """
    import torch

    with open(open_regular(path), "rb") as file:
        content = file.read(os.fstat(file.fileno()).st_size)
    if content.startswith(_GZIP):
        content = gzip.decompress(content)
    if content.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged} is damaged")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


@dataclass
class _Growing:
    """A segment that is being written, and how many threads are at it."""

    writer: SegmentWriter
    at_work: int = 0
    retired: bool = False


class Filler:
    """What one rank puts on the shelf of one cache. ``allowed``: bytes it may take; None: no limit.

    ``maker``: prepares memory for a device, and lets it know of it.
    """

    def __init__(self, cache: HeldCache, *, allowed: int | None = None, maker: SlabMaker | None = None) -> None:
        self.cache = cache
        self._allowed = allowed
        self._maker = maker
        self._shapes = Shapes()
        self._lock = threading.Lock()
        self._growing: _Growing | None = None
        self._mine: list[Segment] = []
        self.full = False

    def attach(self, fd: int) -> Segment:
        """What this or another rank has finished; takes ``fd`` over."""
        registers = self._maker is not None and self._maker.choice.kind == "registered"
        return Segment.in_memory(fd, maker=self._maker if registers else None, name=self.cache.name)

    def drop(self) -> None:
        """What was held is not any more: there is room again."""
        with self._lock:
            self._mine, self.full = [], False

    def fill(
        self, paths: Iterable[str], *, workers: int = 1, progress: Progress | None = None, pace: Pace = AT_ONCE
    ) -> None:
        """Take in every path that is not held yet. ``pace`` may slow it down, and end it early."""
        started = time.perf_counter()
        waiting, handing_out = iter(paths), threading.Lock()

        def thread() -> None:
            pace.begin()
            batches = _Batches(self, self._shapes)
            while not (pace.ended or self.full):
                with handing_out:
                    some = list(islice(waiting, HANDED_OUT))
                if not some:
                    return
                lacking = [path for path in some if key_of(path) not in self.cache.shelf]
                if progress is not None:
                    progress.advance(len(some) - len(lacking))
                while lacking and not pace.ended:
                    done, size = batches.take(lacking)
                    lacking = lacking[done:]
                    if progress is not None:
                        progress.advance(done, size)
                    pace.rest(size)

        with ThreadPoolExecutor(max_workers=max(workers, 1), thread_name_prefix="gh200-fill") as pool:
            for finished in [pool.submit(thread) for _ in range(max(workers, 1))]:
                finished.result()
        self.seal()
        self.cache.statistics.fill_seconds += time.perf_counter() - started

    def copy_from_pack(self, path: str) -> None:
        """Bring an entry to memory, from which a device copies faster."""
        found = self.cache.find(path)
        if found is None or found.address is not None or found.source is None:
            return
        try:
            payload = found.payload
        except DamagedEntry as damaged:
            self.cache.lose(path, damaged)
            return
        rows = found.segment.rows[found.row : found.row + 1].copy()
        rows["size"], rows["mtime_ns"], rows["inode"] = found.source

        def put(writer: SegmentWriter, offsets: np.ndarray) -> None:
            writer.write(int(offsets[0]), payload)

        self.hold(rows, [path], [found.layout.text], put)

    def take_one(self, path: str) -> int:
        """The old way: loaded by torch, taken apart in Python. Bytes read."""
        statistics = self.cache.statistics
        before = look_at([path])
        try:
            record = encode(load_file(path), look_for_nan=self.cache.look_for_nan)
        except FileNotFoundError:
            return 0
        except Unrepresentable as odd:
            statistics.fall_back(odd.reason)
            return 0
        except Exception as failed:  # noqa: BLE001 - a file that doesn't load is upstream's to report; counted by kind
            statistics.fall_back(f"unreadable: {type(failed).__name__}")
            return 0
        if look_at([path]) != before:
            statistics.fall_back("changed while it was read")
            return 0
        rows = _rows_for(before)
        rows["flags"], rows["length"] = FINITE * record.finite, record.size

        def put(writer: SegmentWriter, offsets: np.ndarray) -> None:
            for at, piece in record.pieces:
                writer.write(int(offsets[0]) + at, piece)

        self.hold(rows, [path], [record.layout], put)
        return int(before["size"][0])

    def hold(
        self,
        rows: np.ndarray,
        paths: Sequence[str],
        layouts: Sequence[bytes],
        put: Callable[[SegmentWriter, np.ndarray], None],
        kinds: np.ndarray | int = 0,
    ) -> None:
        """Hold as many of the first entries as there is room for: ``put`` writes their payloads to these offsets.

        ``kinds``: which of ``layouts`` each of them has.
        """
        statistics = self.cache.statistics
        try:
            growing, offsets = self._claim(rows["length"], layouts)
        except (GH200Error, OSError) as refused:  # SimpleTuner has the files: no run ends for want of a copy
            statistics.fall_back(f"no memory: {type(refused).__name__}", len(rows))
            return
        if growing is None:
            return
        count, writer = len(offsets), growing.writer
        try:
            put(writer, offsets)
            keys, places = keys_of(paths[:count]), np.array([writer.layout(text) for text in layouts], np.uint64)[kinds]
            rows["layout_offset"], rows["layout_checksum"] = places[..., 0], places[..., 1]
            rows = rows[:count]
            rows["key_low"], rows["key_high"], rows["offset"] = keys[:, 0], keys[:, 1], offsets
            writer.add(rows, [path.encode("utf-8", "surrogateescape") for path in paths[:count]])
            statistics.published += count
        except (GH200Error, OSError) as refused:
            statistics.fall_back(f"no memory: {type(refused).__name__}", count)
        finally:
            self._leave(growing)

    def _claim(self, lengths: np.ndarray, layouts: Sequence[bytes]) -> tuple[_Growing | None, np.ndarray]:
        """Room for as many as the budget holds, their layouts included."""
        with self._lock:
            growing = self._growing = self._growing or self._begin()
            count = len(lengths)
            if self._allowed is not None:
                held = sum(one.held_bytes for one in self._mine) + growing.writer.used - HEADER_SIZE
                left = self._allowed - held - sum(map(growing.writer.layout_size, layouts))
                ends = np.cumsum(-(-lengths.astype(np.int64) // ALIGNMENT) * ALIGNMENT)
                count = int(np.searchsorted(ends, left, side="right"))
            if count < len(lengths):
                self._say_full(len(lengths) - count)
            if not count:
                return None, lengths[:0]
            growing.at_work += 1
            return growing, growing.writer.claim(lengths[:count])

    def _begin(self) -> _Growing:
        fd = create_memfd(self.cache.name)
        if self._maker is not None:
            self._maker.prepare(fd, 2 * LARGEST)
        return _Growing(SegmentWriter(fd))

    def _leave(self, growing: _Growing) -> None:
        """A thread is done with what it claimed; the last one seals what is large enough."""
        with self._lock:
            growing.at_work -= 1
            enough = min(max(sum(one.held_bytes for one in self._mine) // 8, SMALLEST), LARGEST)
            if growing.writer.used >= enough and self._growing is growing:
                self._growing, growing.retired = None, True
            whole = growing.retired and not growing.at_work
        if whole:
            self._publish(growing)

    def seal(self) -> None:
        """At the end of a pass, when no thread is at work: what came in is found from now on."""
        with self._lock:
            growing, self._growing = self._growing, None
        if growing is not None:
            self._publish(growing)

    def _publish(self, growing: _Growing) -> None:
        fd, statistics = growing.writer.fd, self.cache.statistics
        if not growing.writer.entries:
            os.close(fd)
            return
        try:
            growing.writer.finish()
            segment = self.attach(fd)
            if segment.address is not None:  # now, rather than fault by fault in the first epoch
                advise_pages(segment.address, segment.size, MAP_NOW)
            self.cache.shelf.publish(segment)
        except (GH200Error, OSError) as refused:
            statistics.fall_back(f"no memory: {type(refused).__name__}", growing.writer.entries)
            return
        with self._lock:
            self._mine.append(segment)

    def _say_full(self, count: int) -> None:
        self.cache.statistics.fall_back("over budget", count)
        if not self.full:
            self.full = True
            logger.warning(
                "gh200: cache %s: its budget of %s is full; further entries are read from disk at every use "
                "(cache_config.memory_limit_gb)",
                self.cache.name,
                format_bytes(self._allowed or 0),
            )


def _rows_for(looks: np.ndarray) -> np.ndarray:
    """Rows of files that looked like this."""
    rows = np.zeros(len(looks), TENSORS)
    for name in ("size", "mtime_ns", "ctime_ns", "inode"):
        rows[name] = looks[name]
    return rows


class _Batches:
    """One filling thread's work: batches of files taken apart natively. ``shapes`` is shared by all threads."""

    def __init__(self, filler: Filler, shapes: Shapes) -> None:
        self._filler = filler
        self._shapes = shapes
        self._taker = FileTaker(shapes, look_for_nan=filler.cache.look_for_nan)
        self._expected = 16
        """Files of the next batch: as many as the last ones had room for."""
        self._pays = True

    def take(self, paths: Sequence[str]) -> tuple[int, int]:
        """Take in the first of ``paths``, at least one: how many were looked at, and how many bytes were read."""
        if not self._pays:
            return 1, self._filler.take_one(paths[0])
        some = paths[: self._expected]
        files = self._taker.take(some)
        count = len(files)
        if count < len(some) or len(some) == self._expected:  # else there were no more to take
            self._expected = min(2 * count, MOST_FILES)
        counts, status = self._taker.counts, files["status"]
        taken = np.flatnonzero(status == TAKEN)
        size = self._hold(files, taken, paths) if len(taken) else 0
        if len(taken) < count:
            # Copied: what goes the old way may ask for memory, and these rows are the taker's.
            others = [(number, files[number].copy()) for number in np.flatnonzero(status != TAKEN).tolist()]
            size += sum(self._otherwise(paths[number], file) for number, file in others)
        # Where every file has a pickle of its own, reading them twice gains nothing.
        full = len(self._shapes.known) >= MOST_SHAPES
        self._pays = not full or counts[TAKEN] + counts[REFUSED] > 0
        return count, size

    def _hold(self, files: np.ndarray, taken: np.ndarray, paths: Sequence[str]) -> int:
        chosen, shapes = files[taken], self._shapes.known
        kinds = chosen["shape"].astype(np.intp)
        rows = _rows_for(chosen)
        rows["flags"] = chosen["finite"] * FINITE
        rows["length"] = np.array([shape.payload_size for shape in shapes], np.uint64)[kinds]

        def put(writer: SegmentWriter, offsets: np.ndarray) -> None:
            self._taker.put(taken[: len(offsets)], offsets, fd=writer.fd, address=0)

        used, kinds = np.unique(kinds, return_inverse=True)
        layouts = [shapes[number].layout for number in used.tolist()]
        self._filler.hold(rows, [paths[number] for number in taken.tolist()], layouts, put, kinds)
        return int(chosen["size"].sum())

    def _otherwise(self, path: str, file: np.ndarray) -> int:
        """What was not taken: reported why, or taken the old way. Bytes read."""
        statistics, status = self._filler.cache.statistics, int(file["status"])
        if status == GONE:
            return 0
        if status == CHANGED:
            statistics.fall_back("changed while it was read")
            return 0
        refusal = self._shapes.known[int(file["shape"])].refusal if status == REFUSED else None
        if refusal:
            statistics.fall_back(refusal)
            return int(file["size"])
        statistics.fall_back(NOT_READ_NATIVELY)
        return self._filler.take_one(path)
