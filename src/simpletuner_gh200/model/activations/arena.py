"""Grace memory for saved tensors: a few large slabs, filled from the front in each step and used again in the next.

A step saves in its forward pass and lets go in its backward pass, so ranges are cut one after the other and a slab is
empty again once all of its ranges are back. After the first step of the largest shape nothing is allocated any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import GIB, MIB, format_bytes

logger = logging.getLogger("simpletuner_gh200")

ALIGNMENT = 512
"""As torch's own allocator on a device."""
FIRST_SLAB = 64 * MIB
LARGEST_SLAB = GIB


class Chunk:
    """One slab: how far it is filled, and how many of its ranges are in use."""

    __slots__ = ("address", "filled", "in_use", "size", "slab")

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.address = slab.address
        self.size = slab.size
        self.filled = 0
        self.in_use = 0


Place = tuple[Chunk, int]
"""A range: its chunk, and the address where its bytes go."""


class Arena:
    """Ranges within a limit. Safe from any thread, also from a destructor that runs in the middle of ``take``."""

    def __init__(self, make: Callable[[int], Slab], limit: int) -> None:
        """``make`` gives a slab of so many bytes, or raises MemoryRoomError or OSError."""
        self._make = make
        self._limit = limit
        self._chunks: list[Chunk] = []
        self._at = 0
        self._in_use = 0
        self._lock = threading.RLock()
        self.held = self.slabs = 0
        """Bytes of all slabs, and how many were made."""
        self.refused = 0

    @property
    def in_use(self) -> int:
        """Ranges that are out."""
        return self._in_use

    def room(self) -> int:
        """Bytes that could still be taken, at most."""
        with self._lock:
            fresh = sum(chunk.size - chunk.filled for chunk in self._chunks[self._at :])
            return fresh + self._limit - self.held

    def take(self, size: int) -> Place | None:
        """A range, or None where the limit is reached or memory is refused."""
        needed = (size + ALIGNMENT - 1) & -ALIGNMENT
        with self._lock:
            chunk = self._chunks[self._at] if self._at < len(self._chunks) else None
            if chunk is None or chunk.filled + needed > chunk.size:
                chunk = self._with_room(needed) or self._grow(needed)
            if chunk is None:
                self.refused += 1
                return None
            address = chunk.address + chunk.filled
            chunk.filled += needed
            chunk.in_use += 1
            self._in_use += 1
            return chunk, address

    def give(self, place: Place) -> None:
        """The bytes are no longer needed; whoever writes there next is ordered behind whoever read them."""
        with self._lock:
            chunk = place[0]
            chunk.in_use -= 1
            self._in_use -= 1
            if not chunk.in_use:
                chunk.filled = 0
                if not self._in_use:
                    self._at = 0

    def close(self) -> None:
        """Let go of the slabs; the memory of ranges that are still out goes with the process."""
        with self._lock:
            if not self._in_use:
                for chunk in self._chunks:
                    chunk.slab.close()
            self._chunks.clear()
            self._limit = self.held

    def _with_room(self, needed: int) -> Chunk | None:
        while self._at < len(self._chunks):
            chunk = self._chunks[self._at]
            if chunk.filled + needed <= chunk.size:
                return chunk
            self._at += 1
        for position, chunk in enumerate(self._chunks):  # given back while others are still out: a graph that lives on
            if not chunk.in_use and needed <= chunk.size:
                self._at = position
                return chunk
        return None

    def _grow(self, needed: int) -> Chunk | None:
        left = self._limit - self.held
        if needed > left:
            return None
        size = min(max(needed, FIRST_SLAB, min(self.held, LARGEST_SLAB)), left)
        try:
            chunk = Chunk(self._make(size))
        except (MemoryRoomError, OSError) as refused:
            logger.warning("gh200: %s more for activations could not be had: %s", format_bytes(size), str(refused))
            self._limit = self.held
            return None
        self.held += size
        self.slabs += 1
        self._chunks.append(chunk)
        self._at = len(self._chunks) - 1
        return chunk
