"""A dataset on its way into memory: what is there of it is served, everything else comes from disk until it arrives.

Whatever is written meanwhile must not be served from memory later. So files that a rank forgets before the dataset is
there are forgotten in it too, by every rank, before any rank serves from it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from simpletuner_gh200.store.discovery import is_bookkeeping
from simpletuner_gh200.store.reader import FilePath, ReadCounts, StagedDataset

CAPTION_ENDING = b".txt"


def is_caption(path: bytes) -> bool:
    """Read by SimpleTuner one by one before training starts: they are staged first, being small."""
    return path.endswith(CAPTION_ENDING)


class ComingDataset:
    """Serves ``first`` (the captions) until the whole has arrived. Safe in threads."""

    def __init__(self, first: StagedDataset, wanted: Callable[[], None] = lambda: None) -> None:
        """``wanted`` is called when a file is read that is not there yet: someone has use for the whole."""
        self._now = first
        self._wanted = wanted
        self._next: StagedDataset | None = None
        self._forgotten: list[str | bytes] = []
        self._lock = threading.Lock()
        self.arrived = False

    def view(self, path: FilePath) -> memoryview | None:
        found = self._now.view(path)
        if found is None and not self.arrived and not is_bookkeeping(os.path.basename(os.fsencode(path))):
            self._wanted()
        return found

    def holds(self, path: FilePath) -> bool:
        return self._now.holds(path)

    def forget(self, path: FilePath) -> None:
        """Whoever reads it from now on reads the disk, also once the dataset is there."""
        with self._lock:
            self._now.forget(path)
            if self._next is not None:
                self._next.forget(path)
            elif not self.arrived:
                self._forgotten.append(os.path.abspath(os.fspath(path)))

    def prepare(self, whole: StagedDataset) -> None:
        """Forget in it what was forgotten here. Every rank has done so before any lets it arrive."""
        with self._lock:
            for path in self._forgotten:
                whole.forget(path)
            self._forgotten, self._next = [], whole

    def arrive(self) -> None:
        """From now on the whole is served."""
        with self._lock:
            assert self._next is not None
            self._next.counts = self._now.counts
            self._now, self._next, self.arrived = self._next, None, True

    @property
    def counts(self) -> ReadCounts:
        return self._now.counts

    @property
    def count(self) -> int:
        return self._now.count

    @property
    def held_bytes(self) -> int:
        return self._now.held_bytes

    def summary(self) -> dict[str, Any]:
        return {**self._now.summary(), "arrived": self.arrived}
