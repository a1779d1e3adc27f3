"""One filling thread's work: batches of files taken apart natively and published together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from simpletuner_gh200.cache.entries import Ready
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.cache.tensor_files import MOST_FILES, MOST_SHAPES, FileTaker, Shapes, described
from simpletuner_gh200.held.bulk import CHANGED, GONE, REFUSED, TAKEN

NOT_READ_NATIVELY = "read one by one"
"""Counted for each file that is not as torch usually writes it; what became of it is counted besides."""

OneByOne = Callable[[str], int]
"""Takes a file in the old way; the bytes that are held of it."""


class BatchFiller:
    """Lives in one thread. ``shapes`` is shared by all that fill the same table."""

    def __init__(self, table: Table, shapes: Shapes, one_by_one: OneByOne) -> None:
        self._table = table
        self._shapes = shapes
        self._one_by_one = one_by_one
        self._taker = FileTaker(shapes, look_for_nan=table.look_for_nan)
        self._expected = 16
        """Files of the next batch: as many as the last ones had room for."""
        self._pays = True

    def fill(self, paths: Sequence[str], keys: np.ndarray) -> tuple[int, int]:
        """Take in the first of ``paths``, at least one: how many were looked at, and how many bytes were read."""
        if not self._pays:
            return 1, self._one_by_one(paths[0])
        some = paths[: self._expected]
        files = self._taker.take(some)
        count = len(files)
        if count < len(some) or len(some) == self._expected:  # else there were no more to take
            self._expected = min(2 * count, MOST_FILES)
        counts, status = self._taker.counts, files["status"]
        taken = np.flatnonzero(status == TAKEN)
        size = self._publish(files, taken, keys) if len(taken) else 0
        if len(taken) < count:
            # Copied: what goes the old way may ask for memory, and these rows are the taker's.
            others = [(number, files[number].copy()) for number in np.flatnonzero(status != TAKEN).tolist()]
            size += sum(self._otherwise(paths[number], file) for number, file in others)
        # Where every file has a pickle of its own, reading them twice gains nothing.
        full = len(self._shapes.known) >= MOST_SHAPES
        self._pays = not full or counts[TAKEN] + counts[REFUSED] > 0
        return count, size

    def _publish(self, files: np.ndarray, taken: np.ndarray, keys: np.ndarray) -> int:
        chosen = files[taken]
        shapes = self._shapes.known
        flags, sources = described(chosen)
        kinds = chosen["shape"].astype(np.intp)
        ready = Ready(
            keys=keys[taken],
            layouts=[shape.layout for shape in shapes],
            kinds=kinds,
            sizes=np.array([shape.payload_size for shape in shapes], np.uint64)[kinds],
            flags=flags,
            sources=sources,
        )
        self._table.publish_many(
            ready,
            lambda writer, which, offsets: self._taker.put(taken[which], offsets, fd=writer.fd, address=writer.address),
        )
        return int(chosen["size"].sum())

    def _otherwise(self, path: str, file: np.ndarray) -> int:
        """What was not taken: said why, or taken the old way. Bytes read."""
        statistics, status = self._table.statistics, int(file["status"])
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
        return self._one_by_one(path)
