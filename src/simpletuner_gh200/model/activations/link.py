"""Copies between the device and Grace, and the order between streams: on a GPU, or with host memory on both sides.

``send`` reads what the current stream has written so far; ``bring`` writes to memory of the current stream, whose
``wait`` makes its next work come after the copy. The CPU waits for nothing. Buffers come from the current stream's own
memory, never from the side stream's: so they are used again in that stream's order, without ``record_stream``, which
would hold them for as long as the CPU runs ahead of the device.
"""

from __future__ import annotations

import ctypes
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.model.activations.policy import Rates
from simpletuner_gh200.units import MIB

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("simpletuner_gh200")

Ticket = int
"""Of a copy that was queued; spent by ``wait`` or by a ``done`` that says yes."""

Layout = tuple["torch.dtype", Sequence[int], Sequence[int]]
"""Of a tensor: type, shape, strides."""

MEASURED = 64 * MIB
TIMES = 5


class StillUnderWay(MemoryRoomError):
    """A copy failed, and its end could not be seen: neither side of it may be used for anything else."""


class Link(Protocol):
    device: torch.device

    def send(self, source: int, target: int, size: int) -> Ticket | None:
        """Queue a copy of device bytes to Grace; None: it is done already.

        Raises where nothing is under way, StillUnderWay where that could not be seen."""

    def bring(self, source: int, size: int, layout: Layout) -> tuple[torch.Tensor, Ticket | None]:
        """Queue a copy from Grace into a fresh tensor on the device, of ``size`` bytes and without gaps."""

    def fetch(self, source: int, size: int, layout: Layout) -> torch.Tensor:
        """The same by the ordinary way, waiting for it."""

    def done(self, ticket: Ticket) -> bool: ...

    def wait(self, ticket: Ticket, buffer: torch.Tensor | None = None) -> None:
        """The current stream's next work comes after that copy, which may have been brought for another stream."""

    def settle(self) -> None:
        """Wait until nothing is under way."""

    def mark(self) -> Any:
        """A point in the current stream's work."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; waits for the second."""

    def close(self) -> bool:
        """Wait for what is under way. False: its end could not be seen, so memory must not go yet."""


_quick = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", ctypes.pythonapi))
_QUICK = 64 * 1024
"""Up to here a copy is over before another thread could have made use of the interpreter."""


class HostLink:
    """No device: plain copies, over when they return."""

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")
        self._empty = torch.empty_strided

    def send(self, source: int, target: int, size: int) -> Ticket | None:
        (_quick if size <= _QUICK else ctypes.memmove)(target, source, size)
        return None

    def bring(self, source: int, size: int, layout: Layout) -> tuple[torch.Tensor, Ticket | None]:
        dtype, shape, stride = layout
        buffer = self._empty(shape, stride, dtype=dtype)
        (_quick if size <= _QUICK else ctypes.memmove)(buffer.data_ptr(), source, size)
        return buffer, None

    def fetch(self, source: int, size: int, layout: Layout) -> torch.Tensor:
        return self.bring(source, size, layout)[0]

    def done(self, ticket: Ticket) -> bool:
        return True

    def wait(self, ticket: Ticket, buffer: torch.Tensor | None = None) -> None:
        return None

    def settle(self) -> None:
        return None

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)

    def close(self) -> bool:
        return True


class DeviceLink:
    """Two side streams of torch's, one each way, and the driver's events, which are made once and used again."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        import torch

        self._driver = driver
        self.device = device
        self._ordinal = device.index or 0
        self._current_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        """The current stream's handle, without an object around it, as the compiler's own code asks for it."""
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))  # torch keeps them; so must we
        self._out, self._in = (int(stream.cuda_stream) for stream in self._streams)
        self._empty = torch.empty_strided
        self._events: list[int] = []
        self._made: list[int] = []
        self._before = self._event()
        self._home: dict[int, int] = {}
        """Ticket -> the stream whose memory the copy writes to."""
        self._abandoned: list[torch.Tensor] = []

    def send(self, source: int, target: int, size: int) -> Ticket | None:
        return self._queue(self._out, target, source, size, self._current())

    def bring(self, source: int, size: int, layout: Layout) -> tuple[torch.Tensor, Ticket | None]:
        dtype, shape, stride = layout
        buffer = self._empty(shape, stride, dtype=dtype, device=self.device)
        here = self._current()
        try:
            ticket = self._queue(self._in, buffer.data_ptr(), source, size, here)
        except StillUnderWay:
            self._abandoned.append(buffer)
            raise
        self._home[ticket] = here
        return buffer, ticket

    def _queue(self, side: int, target: int, source: int, size: int, here: int) -> Ticket:
        driver, ordinal = self._driver, self._ordinal
        ticket = self._events.pop() if self._events else self._event()
        try:
            driver.record_event(self._before, here, ordinal)
            driver.wait_event(side, self._before, ordinal)
            driver.copy([(target, source, size)], side, ordinal)
            driver.record_event(ticket, side, ordinal)
        except MemoryRoomError as failed:  # the copy may be under way, and nobody can tell its end but by waiting
            try:
                driver.synchronize_stream(side, ordinal)
            except MemoryRoomError as unseen:
                raise StillUnderWay(str(unseen)) from failed
            self._events.append(ticket)
            raise
        return ticket

    def fetch(self, source: int, size: int, layout: Layout) -> torch.Tensor:
        import torch

        dtype, shape, stride = layout
        there = torch.frombuffer((ctypes.c_uint8 * size).from_address(source), dtype=dtype)
        return torch.as_strided(there.to(self.device), shape, stride)

    def done(self, ticket: Ticket) -> bool:
        if not self._driver.event_done(ticket, self._ordinal):
            return False
        self._spent(ticket)
        return True

    def wait(self, ticket: Ticket, buffer: torch.Tensor | None = None) -> None:
        here = self._current()
        try:
            self._driver.wait_event(here, ticket, self._ordinal)
        except MemoryRoomError:
            for side in (self._out, self._in):  # the slow way to the same end
                self._driver.synchronize_stream(side, self._ordinal)
        if buffer is not None and self._home.get(ticket, here) != here:
            import torch

            buffer.record_stream(torch.cuda.current_stream(self.device))
        self._spent(ticket)

    def settle(self) -> None:
        for side in (self._out, self._in):
            self._driver.synchronize_stream(side, self._ordinal)

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def close(self) -> bool:
        try:
            self.settle()
        except MemoryRoomError as unknown:
            logger.warning("gh200: the end of copies of activations could not be seen: %s", str(unknown))
            return False
        for event in self._made:
            try:
                self._driver.destroy_event(event, self._ordinal)
            except MemoryRoomError as kept:  # an event too many does no harm
                logger.warning("gh200: %s", str(kept))
        self._made.clear()
        self._events.clear()
        return True

    @property
    def events(self) -> int:
        """Events that were ever made: no more after the first step of a shape."""
        return len(self._made)

    def _event(self) -> int:
        event = self._driver.create_event(self._ordinal)
        self._made.append(event)
        return event

    def _spent(self, ticket: Ticket) -> None:
        self._home.pop(ticket, None)
        self._events.append(ticket)

    def _current(self) -> int:
        return self._current_of(self._ordinal)


def measure(link: Link, address: int, size: int) -> Rates:
    """Bytes per second each way over ``size`` bytes of Grace at ``address``, by waiting for each copy."""
    import torch

    buffer = torch.empty(size, dtype=torch.uint8, device=link.device)

    def send() -> Ticket | None:
        return link.send(int(buffer.data_ptr()), address, size)

    def bring() -> Ticket | None:
        return link.bring(address, size, (torch.uint8, (size,), (1,)))[1]

    out, back = (statistics.median(_seconds(link, copy) for _ in range(TIMES)) for copy in (send, bring))
    return Rates(d2h=size / out, h2d=size / back)


def _seconds(link: Link, copy: Callable[[], Ticket | None]) -> float:
    link.settle()
    started = time.perf_counter()
    ticket = copy()
    link.settle()
    taken = time.perf_counter() - started
    if ticket is not None:
        link.wait(ticket)
    return max(taken, 1e-9)
