"""The driver of a machine without CUDA: host memory stands in for the device's, and every call is on record.

Its one "device" can be copied to and from, so that the copier and its users run anywhere; it has no managed memory and
takes no advice, and its capabilities say so. ``device_count()`` is 0: nobody mistakes it for a GPU.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver.interface import (
    Advice,
    Capabilities,
    Copy,
    Location,
    PointerKind,
    RangeState,
    Span,
)
from simpletuner_gh200.memory.mapping import PAGE, Region, map_anonymous

KEPT_CALLS = 4096
"""Of a long run only the latest calls are kept; ``counts`` has them all."""

NOT_SUPPORTED = 801


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


class NullDriver:
    name = "null"
    home = 0

    def __init__(self, reason: str = "the null driver was chosen") -> None:
        self.reason = reason
        self.calls: deque[Call] = deque(maxlen=KEPT_CALLS)
        self.counts: Counter[str] = Counter()
        self._memory: dict[int, Region] = {}
        self._handles = 0
        self._lock = threading.Lock()

    def record(self, name: str, **arguments: Any) -> None:
        """Put a call on the record; the pool uses it too, for what it would have placed."""
        with self._lock:
            self.calls.append(Call(name, arguments))
            self.counts[name] += 1

    def device_count(self) -> int:
        return 0

    def capabilities(self, ordinal: int) -> Capabilities:
        return Capabilities(
            ordinal=ordinal,
            name="no device",
            managed=False,
            concurrent_managed=False,
            pageable_access=False,
            host_page_tables=False,
            direct_managed_from_host=False,
            host_register=False,
            integrated=False,
            device_total=0,
            page_size=PAGE,
            host_node=None,
            device_node=None,
            mode="none",
            absence=self.reason,
        )

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        return (0, 0)

    # -- memory ------------------------------------------------------------------------------------------

    def alloc_managed(self, size: int, ordinal: int) -> int:
        self._refuse("alloc_managed", size=size)

    def alloc_device(self, size: int, ordinal: int) -> int:
        region = map_anonymous(size)
        self.record("alloc_device", size=size)
        with self._lock:
            self._memory[region.address] = region
        return region.address

    def free(self, address: int, ordinal: int) -> None:
        self.record("free", address=address)
        with self._lock:
            known = self._memory.pop(address, None)
        if known is None:
            raise DriverError("free", 1, "INVALID_VALUE", remedy="free what alloc_device returned, once")

    def register_host(self, address: int, size: int, ordinal: int) -> None:
        self._refuse("register_host", size=size)

    def unregister_host(self, address: int, ordinal: int) -> None:
        self._refuse("unregister_host", address=address)

    def pointer_kind(self, address: int) -> PointerKind:
        return "unknown"

    def physical_location(self, address: int) -> Location | None:
        return None

    # -- placement ---------------------------------------------------------------------------------------

    def advise(self, span: Span, advice: Advice, where: Location) -> None:
        self._refuse("advise", size=span[1], advice=advice.name, where=str(where))

    def prefetch(self, spans: Sequence[Span], where: Location, stream: int) -> None:
        self._refuse("prefetch", size=sum(size for _, size in spans), where=str(where))

    def range_state(self, span: Span) -> RangeState:
        return RangeState(preferred=None, last_prefetch=None, read_mostly=False, accessed_by=())

    # -- order: everything is done by the time the call returns ---------------------------------------------

    def create_stream(self, ordinal: int) -> int:
        return self._handle("create_stream")

    def destroy_stream(self, stream: int, ordinal: int) -> None:
        self.record("destroy_stream", stream=stream)

    def synchronize_stream(self, stream: int, ordinal: int) -> None:
        self.record("synchronize_stream", stream=stream)

    def create_event(self, ordinal: int) -> int:
        return self._handle("create_event")

    def destroy_event(self, event: int, ordinal: int) -> None:
        self.record("destroy_event", event=event)

    def record_event(self, event: int, stream: int, ordinal: int) -> None:
        self.record("record_event", event=event, stream=stream)

    def event_done(self, event: int, ordinal: int) -> bool:
        return True

    def wait_event(self, stream: int, event: int, ordinal: int) -> None:
        self.record("wait_event", stream=stream, event=event)

    def copy(self, copies: Sequence[Copy], stream: int, ordinal: int) -> None:
        self.record("copy", count=len(copies), size=sum(size for _, _, size in copies))
        for destination, source, size in copies:
            ctypes.memmove(destination, source, size)

    def copy_seconds(self, copy: Copy, ordinal: int) -> float:
        started = time.perf_counter()
        self.copy([copy], 0, ordinal)
        return time.perf_counter() - started

    # ------------------------------------------------------------------------------------------------------

    def _handle(self, name: str) -> int:
        with self._lock:
            self._handles += 1
            handle = self._handles
        self.record(name, handle=handle)
        return handle

    def _refuse(self, name: str, **arguments: Any) -> NoReturn:
        self.record(name, **arguments)
        raise DriverError(name, NOT_SUPPORTED, "NOT_SUPPORTED", remedy=f"not possible here: {self.reason}")
