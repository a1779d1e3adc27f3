"""The shared control block of one cache: a header, the list of segments, and the slots, all in one memfd.

Every rank of a node maps the same block, so what one rank publishes or withdraws the others see at their next lookup,
without a message. Whoever writes holds ``writing()``: a lock between threads and, through the kernel, between ranks,
which a process that dies gives up by dying.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from simpletuner_gh200.cache.slots import SLOT_BYTES, Key, Slot, Slots, slots_for
from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.memory.slab import Slab

MAGIC = 0x3230304847_43_54
SCHEMA = 1

_HEADER_WORDS = 64
_ROWS = 1024
_ROW_WORDS = 8
_SLOTS_AT = _HEADER_WORDS + _ROWS * _ROW_WORDS

# Header words.
_MAGIC, _SCHEMA, _KEYS, _DROPS, _SEGMENTS, _HELD, _THRESHOLD = range(7)

EVERYTHING = (1 << 64) - 1
"""Admission threshold that lets every key in."""

NOTHING = 0
"""Admission threshold that lets none in, but for one key in 2^64."""


@dataclass(frozen=True)
class SegmentRow:
    """Where a segment's bytes are: a descriptor of process ``pid``, recognisable by device and inode."""

    number: int
    pid: int
    handle: int
    """The descriptor, and whether it is that of a pack."""
    inode: int
    device: int
    size: int
    live: int
    """Entries in it that are still published."""
    held: int
    """Bytes appended to it."""

    @property
    def fd(self) -> int:
        return self.handle >> 1

    @property
    def is_pack(self) -> bool:
        return bool(self.handle & 1)


class ForkedProcess(CacheError):
    """A forked child has its parent's ideas of what is free, so it would write where its parent does: it only reads."""


class Control:
    """One block. ``slab`` is made by the first rank and attached by the others."""

    def __init__(self, slab: Slab, *, shared: bool) -> None:
        assert slab.fd is not None
        self.slab = slab
        self._shared = shared
        self._words = memoryview(slab.array).cast("Q")
        self._lock = threading.RLock()
        self._depth = 0
        self._pid = os.getpid()
        if self._words[_MAGIC] != MAGIC or self._words[_SCHEMA] != SCHEMA:
            raise CacheError("another version of this package made the control block of the node's caches")
        self.words = self._words[_SLOTS_AT:].toreadonly()
        """The words of the slots, for readers in a hurry. Whoever writes does it through ``slots``."""
        self.slots = Slots(self.words)

    @classmethod
    def create(cls, entries: int, *, label: str, shared: bool) -> Control:
        """With room for ``entries`` keys."""
        slab = Slab.shared(_SLOTS_AT * 8 + slots_for(entries) * SLOT_BYTES, label=label)
        words = memoryview(slab.array).cast("Q")
        words[_MAGIC], words[_SCHEMA], words[_THRESHOLD] = MAGIC, SCHEMA, EVERYTHING
        return cls(slab, shared=shared)

    @classmethod
    def attach(cls, fd: int, *, label: str) -> Control:
        return cls(Slab.attach(fd, os.fstat(fd).st_size, label=label), shared=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises ForkedProcess in any process but the one that made or attached this."""
        if self._pid != os.getpid():
            raise ForkedProcess(f"process {os.getpid()} was forked from {self._pid}, which alone writes to this cache")
        with self._lock:
            if self._shared and self._depth == 0:
                self._lock_among_ranks()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._shared and self._depth == 0:
                    fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def _lock_among_ranks(self) -> None:
        """The kernel looks for deadlocks between processes, not threads, and sees some where there are none."""
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX)
                return
            except OSError as refused:
                if refused.errno != errno.EDEADLK:
                    raise
                time.sleep(0.001)

    @property
    def fd(self) -> int:
        assert self.slab.fd is not None
        return self.slab.fd

    # -- header ----------------------------------------------------------------------------------------

    @property
    def keys(self) -> int:
        """Keys that ever took a slot since the last drop; withdrawn ones count."""
        return self._words[_KEYS]

    @keys.setter
    def keys(self, count: int) -> None:
        self._words[_KEYS] = count

    @property
    def drops(self) -> int:
        """Goes up whenever segments were taken out of the list."""
        return self._words[_DROPS]

    @property
    def held(self) -> int:
        """Bytes appended to segments that are in the list."""
        return self._words[_HELD]

    def hold(self, change: int, number: int) -> None:
        """So many bytes were appended to a listed segment."""
        self._words[_HELD] += change
        self._words[self._row_start(number) + 7] += change

    @property
    def threshold(self) -> int:
        """Keys whose high half is above this are not admitted."""
        return self._words[_THRESHOLD]

    @threshold.setter
    def threshold(self, value: int) -> None:
        self._words[_THRESHOLD] = value

    # -- segments --------------------------------------------------------------------------------------

    def add_segment(self, fd: int | None, size: int, *, pack: bool = False) -> int:
        """List a segment of this process; returns its number, which is never used again."""
        number = self._words[_SEGMENTS] + 1
        start = self._row_start(number)
        if self._words[start]:
            raise CacheError(f"more than {_ROWS} segments at once")
        found = os.fstat(fd) if fd is not None else None
        identity = ((fd or 0) << 1 | pack, found.st_ino, found.st_dev) if found else (0, 0, 0)
        fields = (os.getpid(), *identity, size, 0, 0)
        for step, value in enumerate(fields, 1):
            self._words[start + step] = value
        self._words[start] = number
        self._words[_SEGMENTS] = number
        return number

    def row(self, number: int) -> SegmentRow | None:
        start = self._row_start(number)
        row = SegmentRow(*self._words[start : start + _ROW_WORDS].tolist())
        return row if row.number == number else None

    def rows(self) -> list[SegmentRow]:
        rows = (self.row(self._words[_HEADER_WORDS + index * _ROW_WORDS]) for index in range(_ROWS))
        return [row for row in rows if row is not None and row.number]

    def count_live(self, number: int, change: int) -> int:
        """Adjust, and return, how many published entries the segment holds."""
        at = self._row_start(number) + 6
        self._words[at] = max(self._words[at] + change, 0)
        return self._words[at]

    def drop_segment(self, number: int) -> None:
        start = self._row_start(number)
        self._words[start] = 0
        self._words[_HELD] = max(self._words[_HELD] - self._words[start + 7], 0)
        self._words[_DROPS] += 1

    def withdraw(self, key: Key) -> Slot | None:
        """Take an entry out, of whichever process; what it was. Its segment is left to the process that made it."""
        with self.writing():
            old = self.slots.remove(key)
            if old is not None and self.row(old.segment) is not None:
                self.count_live(old.segment, -1)
            return old

    def drop_all(self) -> None:
        """Withdraw every entry and every segment."""
        for row in self.rows():
            self.drop_segment(row.number)
        slots = self._words[_SLOTS_AT:]
        slots.cast("B")[:] = bytes(len(slots) * 8)
        self.keys = 0
        self._words[_HELD] = 0

    @staticmethod
    def _row_start(number: int) -> int:
        return _HEADER_WORDS + (number % _ROWS) * _ROW_WORDS

    def close(self) -> None:
        """Let go of the block: nothing is found any more, and nothing that is written arrives anywhere."""
        self._words = memoryview(bytearray(_SLOTS_AT * 8 + SLOT_BYTES)).cast("Q")
        self.words = self._words[_SLOTS_AT:]
        self.slots = Slots(self.words)
        self._shared = False
        self.slab.close()
