"""Copies beside the computation: a side stream of torch's, an event behind each copy, and who comes after whom.

>>> out, back = lanes(torch.device("cuda", 0))                       # one each way
>>> gone = out.copy([(there, here, size)], out.here())               # after what the current stream has queued so far
>>> come = back.copy([(slot, there, size)], gone, slot_is_free)      # after other copies, or any event of ``here``
>>> back.wait(come)                                                  # the current stream's next work finds the bytes

The CPU waits for nothing. A source may go, and a target be used by another stream, once ``done`` says so or ``wait``
has ordered that stream behind the copy. Buffers come from the current stream's own memory wherever they must be used
again soon: then the order of streams is all they need, and no ``record_stream``, which holds memory for as long as the
CPU runs ahead of the device. Without a device everything is done by the time a call returns.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.errors import GH200Error, MemoryRoomError

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.memory.slab import Bytes

logger = logging.getLogger("simpletuner_gh200")

Spot = tuple["torch.UntypedStorage", int]
"""Where bytes begin: a storage, and how far into it."""

Move = tuple[Spot, Spot, int]
"""To, from, how many bytes."""

Ticket = Any
"""The event behind a copy, or behind what a stream has queued so far; None: it is over."""


class StillUnderWay(MemoryRoomError, RuntimeError):
    """A copy failed, and its end could not be seen: neither side of it may be used for anything else."""


_quick = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", ctypes.pythonapi))
_QUICK = 64 * 1024
"""Up to here a copy is over before another thread could have made use of the interpreter."""


class Lane:
    """Host memory standing in: plain copies, over when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def here(self) -> Ticket:
        """What the current stream has queued so far."""
        return None

    def copy(self, moves: Iterable[Move], *after: Ticket) -> Ticket:
        """Queue copies behind ``after``.

        Raises where that fails and nothing is under way any more, StillUnderWay where that could not be seen."""
        for (to, at), (source, start), size in moves:
            (_quick if size <= _QUICK else ctypes.memmove)(to.data_ptr() + at, source.data_ptr() + start, size)

    def wait(self, ticket: Ticket, brought: torch.Tensor | None = None) -> None:
        """The current stream's next work comes after it. ``brought``: what it brought, maybe for another stream."""

    def done(self, ticket: Ticket) -> bool:
        return True

    def settle(self) -> None:
        """Wait until nothing is under way."""

    def memory(self, size: int) -> torch.Tensor:
        """Bytes of the lane's own, free by the time it gets to them: copied to before the current stream gets there."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def hand_over(self, memory: torch.Tensor) -> None:
        """The current stream reads the lane's ``memory`` from here on."""

    def mark(self) -> Any:
        """A point in the current stream's work."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; waits for the second."""
        return float(end - start)


class CudaLane(Lane):
    """One side stream. Safe to use from several threads."""

    def __init__(self, device: torch.device) -> None:
        import torch

        super().__init__(device)
        self._cuda = torch.cuda
        self._stream = torch.cuda.Stream(device)
        self._abandoned: list[Move] = []
        """Both sides of copies whose end was never seen, kept for ever."""

    def here(self) -> Ticket:
        return self._cuda.current_stream(self.device).record_event()

    def copy(self, moves: Iterable[Move], *after: Ticket) -> Ticket:
        moves, event = list(moves), self._cuda.Event()
        event.home = self._cuda.current_stream(self.device).cuda_stream
        try:
            for earlier in after:
                if earlier is not None:
                    self._stream.wait_event(earlier)
            with self._cuda.stream(self._stream):
                for to, source, size in moves:
                    flat(to, size).copy_(flat(source, size), non_blocking=True)
            event.record(self._stream)
        except RuntimeError as failed:  # some copies may be under way, and nobody can tell their end but by waiting
            try:
                self.settle()
            except RuntimeError as unseen:
                self._abandoned += moves
                raise StillUnderWay(str(unseen)) from failed
            raise
        return event

    def wait(self, ticket: Ticket, brought: torch.Tensor | None = None) -> None:
        if ticket is None:
            return
        current = self._cuda.current_stream(self.device)
        try:
            current.wait_event(ticket)
        except RuntimeError:
            self.settle()  # the slow way to the same end
        if brought is not None and ticket.home != current.cuda_stream:
            brought.record_stream(current)

    def done(self, ticket: Ticket) -> bool:
        return ticket is None or bool(ticket.query())

    def settle(self) -> None:
        self._stream.synchronize()

    def memory(self, size: int) -> torch.Tensor:
        with self._cuda.stream(self._stream):
            return super().memory(size)

    def hand_over(self, memory: torch.Tensor) -> None:
        memory.record_stream(self._cuda.current_stream(self.device))

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def lanes(device: torch.device) -> tuple[Lane, Lane]:
    """One out of the device's memory and one back, so that both directions of the link are used at once."""
    kind = CudaLane if device.type == "cuda" else Lane
    return kind(device), kind(device)


def flat(spot: Spot, size: int) -> torch.Tensor:
    """The bytes themselves."""
    import torch

    storage, start = spot
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))


def spot_of(tensor: torch.Tensor) -> Spot:
    return tensor.untyped_storage(), int(tensor.storage_offset() * tensor.element_size())


class Copier:
    """Stacks pieces of host memory in one buffer on the device, which the current stream's next work finds filled.

    None means that they could not be brought: the caller has its other way, and ``failed`` counts. Pieces are kept
    alive until their copies are done, which the next ``copy`` or ``let_go`` finds out without waiting; until then they
    must not be rewritten. Safe to use from several threads.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._held: deque[tuple[Ticket, Sequence[Bytes]]] = deque()
        self._lost: list[Sequence[Bytes]] = []
        self._closed = False
        self._lock = threading.Lock()
        self.copied = self.failed = 0

    @property
    def under_way(self) -> int:
        """Batches whose pieces are still held, because they were not done when somebody last looked."""
        return len(self._held) + len(self._lost)

    def copy(self, pieces: Sequence[Bytes]) -> torch.Tensor | None:
        """The pieces' bytes, one after the other; None, and counted, where that fails."""
        with self._lock:
            try:
                self._sweep()
                buffer = self._queue(pieces)
            except (GH200Error, RuntimeError) as refused:  # torch's out-of-memory error is a RuntimeError
                self.failed += 1
                if self.failed == 1:
                    logger.warning("gh200: a batch goes to the device the ordinary way: %s (said once)", str(refused))
                return None
            self.copied += 1
            return buffer

    def let_go(self) -> None:
        """Release what copies that are done have read, without waiting: memory that is given back must be free."""
        with self._lock:
            try:
                self._sweep()
            except RuntimeError as unknown:
                logger.warning("gh200: the end of copies to the device could not be observed: %s", str(unknown))

    def close(self) -> None:
        """Wait for the copies that are under way and let go of what they read; buffers stay good.

        Where the end can't be observed nothing is let go of: the device may still be reading."""
        with self._lock:
            self._closed = True
            try:
                if self._held:
                    self._lane.settle()
                self._held.clear()
            except RuntimeError as unknown:
                logger.warning("gh200: the end of copies to the device could not be observed: %s", str(unknown))
        if self.failed:
            total = self.copied + self.failed
            logger.warning("gh200: %d of %d batches could not be copied on a side stream", self.failed, total)

    def _queue(self, pieces: Sequence[Bytes]) -> torch.Tensor:
        if self._closed:
            raise MemoryRoomError("copies to the device have ended")
        buffer = self._lane.memory(max(sum(piece.nbytes for piece in pieces), 1))
        moves: list[Move] = []
        target, at = buffer.untyped_storage(), 0
        for piece in pieces:
            if piece.nbytes:
                moves.append(((target, at), (_storage_at(piece), 0), piece.nbytes))
                at += piece.nbytes
        try:
            ticket = self._lane.copy(moves)
        except StillUnderWay:
            self._lost.append(pieces)
            raise
        self._held.append((ticket, pieces))
        self._lane.wait(ticket)
        self._lane.hand_over(buffer)
        return buffer

    def _sweep(self) -> None:
        while self._held and self._lane.done(self._held[0][0]):
            self._held.popleft()


def _storage_at(piece: Bytes) -> torch.UntypedStorage:
    """By address, since torch warns of arrays that can't be written to; whoever has the piece keeps its memory."""
    import torch

    there = (ctypes.c_uint8 * piece.nbytes).from_address(piece.__array_interface__["data"][0])
    return torch.frombuffer(there, dtype=torch.uint8).untyped_storage()
