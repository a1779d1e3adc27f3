"""Where saved tensors may be: slabs of Grace memory, and the room that a step leaves in HBM.

A step saves in its forward pass and lets go in its backward pass, so ranges are cut one after the other from a few
large slabs, each of which is empty again once all of its ranges are back. After the first step of the largest shape
nothing is allocated any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import torch

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.ceilings import activations_room
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import GIB, MIB, format_bytes

logger = logging.getLogger("simpletuner_gh200")

ALIGNMENT = 512
"""As torch's own allocator on a device."""
FIRST_SLAB = 64 * MIB
LARGEST_SLAB = GIB


class Chunk:
    """One slab: how far it is filled, and how many of its ranges are in use."""

    __slots__ = ("filled", "in_use", "size", "slab", "storage")

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.storage = torch.from_numpy(slab.array).untyped_storage()
        self.size = slab.size
        self.filled = 0
        self.in_use = 0


Place = tuple[Chunk, int]
"""A range: its chunk, and how far into it its bytes go."""


class Arena:
    """Ranges within a limit. Safe from any thread, also from a destructor that runs in the middle of ``take``."""

    def __init__(self, make: Callable[[int], Slab], limit: int) -> None:
        """``make`` gives a slab of so many bytes, or raises MemoryRoomError or OSError."""
        self._make = make
        self._limit = limit
        self._chunks: list[Chunk] = []
        self._at = 0
        self.in_use = 0
        """Ranges that are out."""
        self._lock = threading.RLock()
        self.held = self.slabs = 0
        """Bytes of all slabs, and how many were made."""
        self.refused = 0

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
            at = chunk.filled
            chunk.filled += needed
            chunk.in_use += 1
            self.in_use += 1
            return chunk, at

    def give(self, place: Place) -> None:
        """The bytes are no longer needed; whoever writes there next is ordered behind whoever read them."""
        with self._lock:
            chunk = place[0]
            chunk.in_use -= 1
            self.in_use -= 1
            if not chunk.in_use:
                chunk.filled = 0
                if not self.in_use:
                    self._at = 0

    def close(self) -> None:
        """Let go of the slabs; the memory of ranges that are still out goes with the process."""
        with self._lock:
            if not self.in_use:
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
            logger.warning("gh200: %s more for activations were refused: %s", format_bytes(size), str(refused))
            self._limit = self.held
            return None
        self.held += size
        self.slabs += 1
        self._chunks.append(chunk)
        self._at = len(self._chunks) - 1
        return chunk


class Room:
    """How much HBM saved tensors may take. Without a device there is none: all of them move, so that it is tried."""

    def begin(self) -> None:
        """A step begins whose needs are to be learned: all that it saves leaves the device."""

    def end(self) -> None:
        """A backward pass of that step is over, and nothing came after it. There may be more than one."""

    def bytes(self) -> int:
        """For the step that begins now."""
        return 0


class DeviceRoom(Room):
    """Of a device, by its driver and torch's own statistics.

    Gradients are there at some steps and born in others; they are counted with what a step needs, never twice.
    """

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        reserve: int,
        trained: Callable[[], Iterable[torch.Tensor]],
        idle_in_grace: Callable[[], int] = lambda: 0,
    ) -> None:
        """``trained``: weights whose gradients are in HBM, if they have any; ``idle_in_grace``: what torch counts as
        cached on the device without its being HBM."""
        self._driver = driver
        self._device = device
        self._reserve = reserve
        self._trained = trained
        self._idle_in_grace = idle_in_grace
        self._before = 0
        self._needs = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device) - self._gradients()  # there for the whole step

    def end(self) -> None:
        self._needs = max(self._needs, torch.cuda.max_memory_allocated(self._device) - self._before)

    def bytes(self) -> int:
        free, total = self._driver.memory_info(self._device.index or 0)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        cached = max(cached - self._idle_in_grace(), 0)
        return activations_room(free + cached + self._gradients(), total, self._needs, self._reserve)

    def _gradients(self) -> int:
        return sum(weight.grad.nbytes for weight in self._trained() if weight.grad is not None)
