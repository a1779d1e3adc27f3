"""One filling thread's work: batches of files taken apart natively and published together."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from simpletuner_gh200.cache.slots import FINITE, ORDINARY, key_of, source_words
from simpletuner_gh200.cache.table import Ready, Table
from simpletuner_gh200.cache.tensor_files import (
    CHANGED,
    GONE,
    MOST_SHAPES,
    REFUSED,
    TAKEN,
    FileTaker,
    Shapes,
    TakenFile,
)

MOST_FILES = 256
"""Of a batch."""

NOT_READ_NATIVELY = "read one by one"
"""Counted for each file that is not as torch usually writes it; what became of it is counted besides."""

OneByOne = Callable[[str], int]
"""Takes a file in the old way; the bytes that are held of it."""


class BatchFiller:
    """Lives in one thread. ``shapes`` is shared by all that fill the same table."""

    def __init__(self, table: Table, library: ctypes.CDLL, shapes: Shapes, one_by_one: OneByOne) -> None:
        self._table = table
        self._shapes = shapes
        self._one_by_one = one_by_one
        self._taker = FileTaker(library, shapes, look_for_nan=table.look_for_nan)
        self._expected = 16
        """Files of the next batch: as many as the last ones had room for."""
        self._pays = True

    def fill(self, paths: Sequence[str]) -> tuple[int, int]:
        """Take in the first of ``paths``, at least one: how many were looked at, and how many bytes were read."""
        if not self._pays:
            return 1, self._one_by_one(paths[0])
        some = paths[: self._expected]
        taken = self._taker.take(some)
        self._expected = min(2 * len(taken), MOST_FILES)
        size = self._publish(some, taken)
        for path, file in zip(some, taken, strict=False):
            size += self._otherwise(path, file)
        # Where every file has a pickle of its own, reading them twice gains nothing.
        full = len(self._shapes.known) >= MOST_SHAPES
        self._pays = not full or any(file.status in (TAKEN, REFUSED) for file in taken)
        return len(taken), size

    def _publish(self, paths: Sequence[str], taken: Sequence[TakenFile]) -> int:
        numbers, ready, size = [], [], 0
        for number, file in enumerate(taken):
            if file.status != TAKEN or file.shape is None:
                continue
            flags = (FINITE if file.finite else 0) | (ORDINARY if file.ordinary else 0)
            source = source_words(file.size, file.mtime_ns, file.inode)
            ready.append(Ready(key_of(paths[number]), file.shape.layout, file.shape.payload_size, flags, source))
            numbers.append(number)
            size += file.size
        if ready:
            self._table.publish_many(
                ready,
                lambda writer, which, offsets: self._taker.put(
                    [numbers[at] for at in which], offsets, fd=writer.fd, address=writer.address
                ),
            )
        return size

    def _otherwise(self, path: str, file: TakenFile) -> int:
        """What was not taken: said why, or taken the old way. Bytes read."""
        statistics = self._table.statistics
        if file.status in (TAKEN, GONE):
            return 0
        if file.status == CHANGED:
            statistics.fall_back("changed while it was read")
            return 0
        if file.status == REFUSED and file.shape is not None and file.shape.refusal:
            statistics.fall_back(file.shape.refusal)
            return file.size
        statistics.fall_back(NOT_READ_NATIVELY)
        return self._one_by_one(path)
