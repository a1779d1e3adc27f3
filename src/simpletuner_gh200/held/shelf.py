"""What a rank finds: a dict of its own over the segments that the ranks of its node have made.

>>> board = Board.create(ranks=2)                  # the leader; the others: ``Board.attach(fd)``
>>> shelf = Shelf(board, rank=0, attach=Segment.in_memory)
>>> shelf.publish(segment)                         # whole: this rank finds it now, the others at their next ``refresh``
>>> shelf.refresh()                                # cheap; takes in what others published
>>> shelf.get(key_of(path))                        # (segment, row), or None
>>> shelf.forget(key_of(path))                     # in this rank: every rank sees for itself what changed on disk

Nothing is shared but the board, on which each rank writes its own column: how many segments it has made, and by which
descriptor each is reached. No reader takes a lock. A forked child finds what its parent had found.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from simpletuner_gh200.errors import CacheError, MemoryRoomError
from simpletuner_gh200.held.segment import Segment
from simpletuner_gh200.memory.slab import Slab

MOST_SEGMENTS = 4096
"""Of one rank. They grow with what is held, so that there are few."""

_ROW = np.dtype([("pid", np.uint64), ("fd", np.uint64), ("inode", np.uint64), ("device", np.uint64)])
_COLUMN = 8 + MOST_SEGMENTS * _ROW.itemsize
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


class Board:
    """In shared memory: how many segments each rank has made, and a column of each."""

    def __init__(self, slab: Slab) -> None:
        assert slab.fd is not None
        self.slab, self.fd = slab, slab.fd
        ranks = slab.size // _COLUMN
        self._counts = memoryview(slab.array[: 8 * ranks].view(np.uint64))
        self._rows = slab.array[8 * ranks :].view(_ROW).reshape(ranks, MOST_SEGMENTS)

    @classmethod
    def create(cls, ranks: int = 1) -> Board:
        """Address space, not memory: pages are taken as they are written."""
        return cls(Slab.shared(ranks * _COLUMN, label="board"))

    @classmethod
    def attach(cls, fd: int) -> Board:
        """The same memory in another rank; takes ``fd`` over."""
        try:
            return cls(Slab.attach(fd, os.fstat(fd).st_size, label="board"))
        finally:
            os.close(fd)

    def generation(self) -> bytes:
        """Another one whenever something was published."""
        return self._counts.tobytes()

    def post(self, rank: int, fd: int) -> None:
        found, number = os.fstat(fd), self._counts[rank]
        if number == MOST_SEGMENTS:
            raise CacheError(f"more than {MOST_SEGMENTS} segments")
        self._rows[rank, number] = (os.getpid(), fd, found.st_ino, found.st_dev)
        self._counts[rank] = number + 1  # after the row; a reader who sees it first finds no such memory, and waits

    def posted(self, seen: list[int]) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        """(rank, row) of what was posted since so many of each rank were seen."""
        for rank, before in enumerate(seen):
            for number in range(before, self._counts[rank]):
                yield rank, self._rows[rank, number].item()

    def new_sight(self) -> list[int]:
        return [0] * len(self._counts)


class Shelf:
    """Of one rank. Getting is safe in any thread; whoever publishes, refreshes or clears takes the lock."""

    def __init__(self, board: Board, *, rank: int, attach: Callable[[int], Segment]) -> None:
        """``attach``: makes a segment of another rank's descriptor, and takes that over."""
        self.board = board
        self._rank = rank
        self._attach = attach
        self._state: tuple[dict[bytes, int], list[Segment]] = ({}, [])
        """Together, so that whoever looks while it is cleared has both of one time."""
        self._seen = board.new_sight()
        self._generation = bytes(len(board.generation()))
        self._lock = threading.RLock()
        _shelves.add(self)

    @property
    def segments(self) -> list[Segment]:
        """In the order in which they came; a later one's entry takes the place of an earlier one's."""
        return self._state[1]

    def __len__(self) -> int:
        return len(self._state[0])

    def __contains__(self, key: bytes) -> bool:
        return key in self._state[0]

    def get(self, key: bytes) -> tuple[Segment, int] | None:
        places, segments = self._state
        place = places.get(key)
        return None if place is None else (segments[place >> _ROW_BITS], place & _ROW_MASK)

    def current(self) -> Iterator[tuple[bytes, Segment, int]]:
        """Every entry, as of now."""
        places, segments = self._state
        for key, place in list(places.items()):
            yield key, segments[place >> _ROW_BITS], place & _ROW_MASK

    def add(self, segment: Segment) -> None:
        """For this rank alone: a pack, which every rank opens for itself."""
        with self._lock:
            places, segments = self._state
            base = len(segments) << _ROW_BITS
            segments.append(segment)
            places.update(zip(segment.keys(), range(base, base + len(segment)), strict=True))

    def publish(self, segment: Segment) -> None:
        """For all ranks of the node."""
        with self._lock:
            self.add(segment)
            self.board.post(self._rank, segment.fd)
            self._seen[self._rank] += 1

    def refresh(self) -> bool:
        """Take in what other ranks published, if anything; True where there was something."""
        now = self.board.generation()
        if now == self._generation:
            return False
        with self._lock:
            complete = True
            for rank, row in list(self.board.posted(self._seen)):
                if not self._reach(rank, row):
                    complete = False  # its row is not all there yet: the next look finds it
                    break
                self._seen[rank] += 1
            if complete:
                self._generation = now
        return True

    def _reach(self, rank: int, row: tuple[int, int, int, int]) -> bool:
        """False for a row that can't be right, since whoever writes it is at it."""
        pid, fd, inode, device = row
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return pid != 0 and not os.path.exists(f"/proc/{pid}/fd/{fd}")  # its rank has ended
        found = os.fstat(opened)
        if (found.st_ino, found.st_dev) != (inode, device):
            os.close(opened)
            return False
        try:
            self.add(self._attach(opened))
        except (CacheError, MemoryRoomError):
            return True  # what can't be had here is SimpleTuner's to read
        return True

    def forget(self, key: bytes) -> None:
        self._state[0].pop(key, None)

    def clear(self) -> None:
        """Find nothing any more; memory goes with the last value that was handed out."""
        with self._lock:
            self._state = ({}, [])


_shelves: weakref.WeakSet[Shelf] = weakref.WeakSet()


def _unlock_in_child() -> None:
    """A thread that is not in the child may have had the lock when it was forked."""
    for shelf in list(_shelves):
        shelf._lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock_in_child)
