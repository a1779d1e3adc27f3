"""Batch buffers that are used again: fresh memory costs a page fault per 4 KiB, more than the copy itself.

A buffer is lent as a numpy array. torch keeps that array alive as long as any tensor on it exists, saved for backward
or not, so the buffer comes back exactly when the last one is gone, and never before. What fills them copies by address.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import memmove
from functools import cache

import numpy as np

from simpletuner_gh200.held.bulk import library
from simpletuner_gh200.held.segment import Bytes
from simpletuner_gh200.memory.ceilings import IDLE_BUFFERS
from simpletuner_gh200.memory.mapping import HUGE, LARGE_PAGE, PAGE, Region, advise_pages, map_anonymous

SMALLEST = 64 * 1024
"""Below this the allocator's own reuse is as good."""


class _Lease:
    __slots__ = ("__array_interface__", "_pool", "_region")

    def __init__(self, pool: BufferPool, region: Region, size: int) -> None:
        self._pool = pool
        self._region = region
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (region.address, False)}

    def __del__(self) -> None:
        self._pool.take_back(self._region)


class BufferPool:
    """Keeps at most ``keep`` bytes that nobody uses. Safe from several threads."""

    def __init__(self, keep: int = IDLE_BUFFERS) -> None:
        self._keep = keep
        self._free: defaultdict[int, list[Region]] = defaultdict(list)
        self._idle = 0
        self._returned: deque[Region] = deque()
        """Given back and not sorted in yet."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.made = 0
        self.reused = 0

    def get(self, size: int) -> Bytes:
        """``size`` writable bytes with whatever was in them, page-aligned where they are pooled."""
        if size < SMALLEST or os.getpid() != self._pid:  # a thread of the parent may have had the lock at the fork
            return np.empty(size, np.uint8)
        capacity = -(-size // PAGE) * PAGE
        with self._lock:
            self._sort_in()
            waiting = self._free[capacity]
            region = waiting.pop() if waiting else None
            if region is not None:
                self._idle -= capacity
                self.reused += 1
            else:
                self.made += 1
        region = region or _fresh(capacity)
        array: Bytes = np.asarray(_Lease(self, region, size))
        return array

    def take_back(self, region: Region) -> None:
        """Called whenever a lease dies, which may be in mid-``get`` of the same thread: it never waits for the lock."""
        self._returned.append(region)
        # Whoever has the lock looks again after letting it go, so nothing stays behind.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            region = self._returned.popleft()
            if self._idle + region.size <= self._keep:
                self._idle += region.size
                self._free[region.size].append(region)


def _fresh(size: int) -> Region:
    region = map_anonymous(size)
    if PAGE < LARGE_PAGE:
        advise_pages(region.address, size, HUGE)
    return region


Job = tuple[int, int, int]
"""(destination, source, size)"""

PARALLEL_FROM = 4 << 20
"""Bytes below which handing out work costs more than it gains."""

PIECE = 1 << 20
"""Bytes that a thread takes on at a time, at most."""

MOST_THREADS = 8

_pool: tuple[int, ThreadPoolExecutor] | None = None


def copy_rows(target: int, sources: Sequence[int], size: int, *, skip: int = 0) -> None:
    """Copy ``size`` bytes from each of ``sources``, one after the other, to ``target``; returns when all are there.

    One core can't saturate the memory of a machine with many, and ``memmove`` through ctypes lets go of the lock that
    the interpreter has. torch's own thread pool is not used: it hangs in forked children and spins on busy machines.

    ``skip``: bytes that each of them begins with and that are not wanted.
    """
    if size * len(sources) < PARALLEL_FROM or (threads := min(MOST_THREADS, _cores())) < 2:
        rows = array("Q", sources)
        # In one call: each gives the interpreter's lock away and takes it back.
        library().gh200_copy_rows(target, rows.buffer_info()[0], len(rows), size, skip)
        return
    # Whoever is free takes the next piece: a helper that is late, or never gets a core, is not waited for.
    waiting = deque(
        (target + index * size + at, source + skip + at, min(PIECE, size - at))
        for index, source in enumerate(sources)
        for at in range(0, size, PIECE)
    )
    helping: list[Future[None]] = [_helpers().submit(_copy_some, waiting) for _ in range(threads - 1)]
    _copy_some(waiting)
    for one in helping:
        if not one.cancel():
            one.result()


def address_of(buffer: Bytes) -> int:
    """Where a buffer's bytes are; several times faster than ``buffer.ctypes.data``."""
    address: int = buffer.__array_interface__["data"][0]
    return address


def _copy_some(waiting: deque[Job]) -> None:
    while True:
        try:
            target, source, size = waiting.popleft()
        except IndexError:
            return
        memmove(target, source, size)


@cache
def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _helpers() -> ThreadPoolExecutor:
    """One pool per process: the threads of a parent don't exist in its child."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():
        _pool = os.getpid(), ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="gh200-copy")
    return _pool[1]
