"""A dataset on its way into memory: what is there of it is served, everything else comes from disk until it arrives.

Whatever is written meanwhile must not be served from memory later. So files that a rank forgets before the dataset is
there are forgotten in it too, by every rank, before any rank serves from it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.store.discovery import is_bookkeeping
from simpletuner_gh200.store.reader import FilePath, ReadCounts, StagedDataset
from simpletuner_gh200.store.shared_memory import nothing_staged

CAPTION_ENDING = b".txt"


def is_caption(path: bytes) -> bool:
    """Read by SimpleTuner one by one before training starts: they are staged first, being small."""
    return path.endswith(CAPTION_ENDING)


class ComingDataset:
    """Serves ``first`` (the captions) until the whole has arrived. Safe in threads."""

    def __init__(self, first: StagedDataset | Future[StagedDataset], wanted: Callable[[], None] = lambda: None) -> None:
        """``first`` may still be on its way: whoever reads a caption waits for it, or reads the disk where it failed.

        ``wanted`` is called when a file is read that is not there yet: someone has use for the whole.
        """
        self._first = first if isinstance(first, Future) else None
        self._now = first if isinstance(first, StagedDataset) else _nothing()
        self._owner = os.getpid()
        self._wanted = wanted
        self._next: StagedDataset | None = None
        self._forgotten: list[str | bytes] = []
        self._lock = threading.Lock()
        self.arrived = False

    def view(self, path: FilePath) -> memoryview | None:
        if self._first is not None and is_caption(os.fsencode(path)):
            self._take_first(self._first)
        found = self._now.view(path)
        if found is None and not self.arrived and not is_bookkeeping(os.path.basename(os.fsencode(path))):
            self._wanted()
        return found

    def _take_first(self, coming: Future[StagedDataset]) -> None:
        if os.getpid() != self._owner and not coming.done():
            return  # the thread that stages them is not in a forked child
        try:
            first = coming.result()
        except (GH200Error, OSError):  # raised before training, where somebody hears it
            self._first = None
            return
        with self._lock:
            if self._first is not None and not self.arrived:
                for path in self._forgotten:
                    first.forget(path)
                first.counts, self._now = self._now.counts, first
            self._first = None

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
            self._now, self._next, self._first, self.arrived = self._next, None, None, True

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


def _nothing() -> StagedDataset:
    memory = nothing_staged()
    try:
        return StagedDataset(memory)
    finally:
        memory.close()
