"""The memory that a dataset is written into: a memfd that grows from front to back, up to a ceiling, then is sealed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from simpletuner_gh200.memory.mapping import create_memfd, map_file, seal
from simpletuner_gh200.memory.numa import bind, read_nodes

Piece = bytes | bytearray | memoryview

ALIGNMENT = 64
_MOST_PIECES = 512


class SlabFull(Exception):
    """The ceiling is reached; ``needed`` is what would have been held at least."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"{needed} bytes")
        self.needed = needed


class SlabWriter:
    """Claims are made under a lock, writes go on side by side. Nothing is mapped, so it can be sealed at the end."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self._fd = create_memfd("dataset")
        self.used = 0

    def keep_on_cpu_nodes(self, at_most: int) -> str:
        """Have the kernel take pages from nodes with CPUs only, never from a GPU's memory; what came of it.

        The policy belongs to the memory, not to this mapping of it, so it holds for whoever writes later.
        """
        if not at_most or len(read_nodes()) < 2:
            return "one memory node: nothing to choose"
        os.ftruncate(self._fd, at_most)
        mapped = map_file(self._fd, at_most)
        return bind(mapped.address, at_most).reason

    def claim(self, size: int) -> int:
        """Offset of ``size`` fresh bytes; SlabFull where they would go over the ceiling."""
        with self._lock:
            start = -(-self.used // ALIGNMENT) * ALIGNMENT
            if start + size > self._allowed:
                raise SlabFull(start + size)
            self.used = start + size
            return start

    def write(self, offset: int, piece: Piece) -> None:
        view = memoryview(piece)
        while view:
            with self._refused():
                written = os.pwrite(self._fd, view, offset)
            offset, view = offset + written, view[written:]

    def append(self, pieces: Sequence[Piece]) -> int:
        """Write the pieces one after the other; where the first begins."""
        start = self.claim(sum(len(piece) for piece in pieces))
        at = start
        for first in range(0, len(pieces), _MOST_PIECES):
            group = pieces[first : first + _MOST_PIECES]
            size = sum(len(piece) for piece in group)
            with self._refused():
                written = os.pwritev(self._fd, group, at)
            if written != size:  # short: do it piece by piece
                position = at
                for piece in group:
                    self.write(position, piece)
                    position += len(piece)
            at += size
        return start

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Memory that the kernel does not give is the ceiling too, not trouble with the file that is being read."""
        try:
            yield
        except OSError as refused:
            raise SlabFull(self.used) from refused

    def finish(self) -> int:
        """The sealed memfd, of exactly the size that was used. The caller owns it."""
        os.ftruncate(self._fd, self.used)
        seal(self._fd)
        fd, self._fd = self._fd, -1
        return fd

    def discard(self) -> None:
        """Give everything back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
