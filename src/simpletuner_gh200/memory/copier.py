"""Bringing bytes from slabs to the device on a side stream: the CPU waits for nothing, the consumer's stream does.

>>> copier = Copier(current(), TorchMemory("cuda:0"))
>>> buffer = copier.copy([SlabRange(slab, 0, 4096), SlabRange(slab, 8192, 4096)])   # one buffer, stacked; or None
>>> copier.close()

What is queued on the caller's current stream after ``copy`` finds the bytes there. None means that they could not be
brought: the caller has its other way, and ``failed`` counts. Sources are kept alive until their copies are done, which
the next ``copy`` or ``let_go`` finds out without waiting; until then they must not be rewritten. Without CUDA
(``TorchMemory("cpu")``, null driver) it all works the same, with host memory standing in.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from simpletuner_gh200.errors import GH200Error, MemoryRoomError
from simpletuner_gh200.memory.driver.interface import Copy, Driver
from simpletuner_gh200.memory.slab import Slab

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("simpletuner_gh200")

Buffer = TypeVar("Buffer")


class SlabRange(NamedTuple):
    slab: Slab
    offset: int
    size: int


class DeviceMemory(Protocol[Buffer]):
    """Where copies land, and the streams they meet on. A buffer goes back when nobody holds it any more."""

    ordinal: int
    side_stream: int
    """The stream that copies are queued on; its owner keeps it as long as any buffer lives."""

    def take(self, size: int) -> Buffer:
        """Fresh memory, belonging to the side stream: what used it before is over by the time that stream gets here."""

    def address(self, buffer: Buffer) -> int: ...

    def consumer_stream(self) -> int:
        """The stream on which the calling thread's next work will be queued."""

    def hand_over(self, buffer: Buffer) -> None:
        """The consumer's stream reads it from here on: its memory is used for nothing else before that is done."""


class TorchMemory:
    """Memory of torch's own allocator, so that its statistics and its stream rules cover it; on the CPU without CUDA.

    The side stream is one of torch's, too: torch keeps those to the end, as its allocator needs them.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        import torch

        self.device = torch.device(device)
        self.ordinal = self.device.index or 0
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.side_stream = int(self._side.cuda_stream) if self._side is not None else 0

    def take(self, size: int) -> torch.Tensor:
        import torch

        if self._side is None:
            return torch.empty(size, dtype=torch.uint8)
        with torch.cuda.stream(self._side):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def address(self, buffer: torch.Tensor) -> int:
        return int(buffer.data_ptr())

    def consumer_stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self.device).cuda_stream) if self._side is not None else 0

    def hand_over(self, buffer: torch.Tensor) -> None:
        if self._side is not None:
            import torch

            # torch's own object: a stream made from the default stream's number is not the default stream to it.
            buffer.record_stream(torch.cuda.current_stream(self.device))


@dataclass
class _UnderWay:
    """Copies that were queued, what they read, and the event behind them."""

    event: int
    sources: list[Any]
    recorded: bool = False


class Copier(Generic[Buffer]):
    """Safe to use from several threads; belongs to the process that made it."""

    def __init__(self, driver: Driver, memory: DeviceMemory[Buffer]) -> None:
        self._driver = driver
        self._memory = memory
        self._under_way: deque[_UnderWay] = deque()
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.copied = self.failed = 0

    @property
    def under_way(self) -> int:
        """Copies whose sources are still held, because they were not done when somebody last looked."""
        return len(self._under_way)

    def copy(self, ranges: Sequence[SlabRange]) -> Buffer | None:
        """The ranges' bytes, one after the other in one buffer; None, and counted, where that fails."""
        self._refuse_fork()
        with self._lock:
            try:
                self._sweep()
                buffer = self._queue(ranges)
            except (GH200Error, RuntimeError) as refused:  # torch's out-of-memory error is a RuntimeError
                self._fell_through(refused)
                return None
            self.copied += 1
            return buffer

    def let_go(self) -> None:
        """Release what copies that are done have read, without waiting: memory that is given back must be free."""
        if os.getpid() != self._pid or not self._under_way:
            return
        with self._lock:
            try:
                self._sweep()
            except MemoryRoomError as unknown:
                logger.warning("gh200: the end of copies to the device could not be observed: %s", str(unknown))

    def close(self) -> None:
        """Wait for the copies that are under way and let go of what they read. Buffers stay good; closing twice, too.

        Where the end can't be observed nothing is let go of: the device may still be reading.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            try:
                if self._under_way:
                    self._driver.synchronize_stream(self._memory.side_stream, self._memory.ordinal)
                while self._under_way:
                    self._drop_oldest()
            except MemoryRoomError as unknown:
                logger.warning("gh200: the end of copies to the device could not be observed: %s", str(unknown))
        if self.failed:
            total = self.copied + self.failed
            logger.warning("gh200: %d of %d batches could not be copied on a side stream", self.failed, total)

    # -- under the lock ----------------------------------------------------------------------------------

    def _queue(self, ranges: Sequence[SlabRange]) -> Buffer:
        if self._closed:
            raise MemoryRoomError("copies to the device have ended")
        driver, memory = self._driver, self._memory
        # Views hold the memory of their slabs, closed or not.
        sources = [part.slab.bytes_at(part.offset, part.size) for part in ranges]
        buffer = memory.take(max(sum(part.size for part in ranges), 1))
        batch = _UnderWay(driver.create_event(memory.ordinal), sources)
        self._under_way.append(batch)
        try:
            driver.copy(copies_of(ranges, memory.address(buffer)), memory.side_stream, memory.ordinal)
        finally:  # copies that were queued before one that failed read their sources too
            self._record(batch)
        driver.wait_event(memory.consumer_stream(), batch.event, memory.ordinal)
        memory.hand_over(buffer)
        return buffer

    def _record(self, batch: _UnderWay) -> None:
        self._driver.record_event(batch.event, self._memory.side_stream, self._memory.ordinal)
        batch.recorded = True

    def _sweep(self) -> None:
        """Release the sources of copies that are done, as far as that is known by now: nobody waits here."""
        while self._under_way:
            oldest = self._under_way[0]
            if not oldest.recorded:
                # An event that was never recorded counts as done. Recorded now it is behind those copies just as well.
                self._record(oldest)
            if not self._driver.event_done(oldest.event, self._memory.ordinal):
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        done = self._under_way.popleft()
        try:
            self._driver.destroy_event(done.event, self._memory.ordinal)
        except MemoryRoomError as kept:  # an event too many does no harm; its copies are done
            logger.warning("gh200: %s", str(kept))

    def _fell_through(self, refused: Exception) -> None:
        self.failed += 1
        if self.failed == 1:
            logger.warning("gh200: a batch goes to the device the ordinary way: %s (said once)", str(refused))

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise MemoryRoomError(
                "copies to the device belong to the process that started them, and this is a forked child",
                remedy="assemble batches in the training process only",
            )


def copies_of(ranges: Sequence[SlabRange], destination: int) -> list[Copy]:
    """The copies that stack ``ranges`` at ``destination``; neighbours in one slab are copied in one go."""
    merged: list[Copy] = []
    last: Slab | None = None
    for slab, offset, size in ranges:
        source = slab.address + offset
        if slab is last and merged[-1][1] + merged[-1][2] == source:
            to, start, before = merged[-1]
            merged[-1] = (to, start, before + size)
        elif size:
            merged.append((destination, source, size))
            last = slab
        destination += size
    return merged
