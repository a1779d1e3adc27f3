"""Copies by address: one after the other, or for large batches spread over a few threads.

One core can't saturate the memory of a machine with many; ``memmove`` through ctypes lets go of the interpreter's lock,
so plain threads do. torch's own thread pool is not used: it hangs in forked children and spins on busy machines.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import memmove
from functools import cache

from simpletuner_gh200.held.bulk import library
from simpletuner_gh200.held.segment import Bytes

Job = tuple[int, int, int]
"""(destination, source, size)"""

PARALLEL_FROM = 4 << 20
"""Bytes below which handing out work costs more than it gains."""

PIECE = 1 << 20
"""Bytes that a thread takes on at a time."""

MOST_THREADS = 8

_pool: tuple[int, ThreadPoolExecutor] | None = None


def copy_rows(target: int, sources: Sequence[int], size: int, *, skip: int = 0) -> None:
    """Copy ``size`` bytes from each of ``sources``, one after the other, to ``target``; returns when all are there.

    ``skip``: bytes that each of them begins with and that are not wanted.
    """
    if size * len(sources) < PARALLEL_FROM or (threads := min(MOST_THREADS, _cores())) < 2:
        rows = array("Q", sources)
        # In one call: each gives the interpreter's lock away and takes it back.
        library().gh200_copy_rows(target, rows.buffer_info()[0], len(rows), size, skip)
        return
    jobs = [(target + index * size, source + skip, size) for index, source in enumerate(sources)]
    # Whoever is free takes the next piece: a helper that is late, or never gets a core, is not waited for.
    waiting = deque(split(jobs, max(threads, size * len(sources) // PIECE)))
    helping: list[Future[None]] = [_helpers().submit(_copy_some, waiting) for _ in range(threads - 1)]
    _copy_some(waiting)
    for one in helping:
        if not one.cancel():
            one.result()


def address_of(buffer: Bytes) -> int:
    """Where a buffer's bytes are; several times faster than ``buffer.ctypes.data``."""
    address: int = buffer.__array_interface__["data"][0]
    return address


def split(jobs: Sequence[Job], parts: int) -> list[list[Job]]:
    """Neighbouring jobs in at most so many parts of about the same number of bytes; large jobs are cut."""
    share = -(-sum(size for _, _, size in jobs) // parts)
    made: list[list[Job]] = [[]]
    room = share
    for target, source, size in jobs:
        while size > room:
            made[-1].append((target, source, room))
            target, source, size = target + room, source + room, size - room
            made.append([])
            room = share
        made[-1].append((target, source, size))
        room -= size
    return [part for part in made if part]


def _copy_some(waiting: deque[list[Job]]) -> None:
    while True:
        try:
            part = waiting.popleft()
        except IndexError:
            return
        for target, source, size in part:
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
