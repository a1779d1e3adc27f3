"""The CUDA driver through NVIDIA's own bindings (``cuda-bindings`` 12.8 to 13.x), driver API only.

The runtime half of the bindings embeds a second CUDA runtime, so it stays out. Each call runs in the device's primary
context, the one PyTorch uses, and leaves the calling thread's context as it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.driver.bindings import Bindings
from simpletuner_gh200.memory.driver.interface import (
    Advice,
    Capabilities,
    Copy,
    Location,
    PointerKind,
    RangeState,
    Span,
)
from simpletuner_gh200.memory.driver.probe import probe

_INVALID_VALUE = 1
_NOT_READY = 600
_ATTACH_GLOBAL = 1
_PORTABLE_AND_MAPPED = 1 | 2
_NON_BLOCKING = 1
_NO_TIMING = 2
_MEMORY_TYPE, _IS_MANAGED = 2, 8
_HOST_MEMORY = 1
_READ_MOSTLY, _PREFERRED, _ACCESSED_BY, _LAST_PREFETCH = 1, 2, 3, 4
_PREFERRED_TYPE, _LAST_PREFETCH_TYPE = 5, 7
_CPU_DEVICE, _NO_DEVICE = -1, -2
_MOST_ACCESSORS = 16


class CudaDriver:
    """One per process. Raises DriverError when there is no driver or no device.

    ``home`` is the device of this rank. A context costs hundreds of megabytes of device memory, so none is made on
    another device unless a call names it.
    """

    name = "cuda"

    def __init__(self, home: int = 0) -> None:
        self.home = home
        self._api = Bindings()
        self._pid = os.getpid()
        self._api.call("cuInit", 0)
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._capabilities: dict[int, Capabilities] = {}

    @property
    def owns_this_process(self) -> bool:
        """False in a forked child, which must leave the parent's CUDA state alone."""
        return os.getpid() == self._pid

    def device_count(self) -> int:
        self._refuse_fork()
        return int(self._api.call("cuDeviceGetCount"))

    def capabilities(self, ordinal: int) -> Capabilities:
        self._refuse_fork()
        with self._lock:
            if ordinal not in self._capabilities:
                self._capabilities[ordinal] = probe(self._api, ordinal)
            return self._capabilities[ordinal]

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        with self._in_context(ordinal):
            free, total = self._api.call("cuMemGetInfo")
        return int(free), int(total)

    # -- memory ------------------------------------------------------------------------------------------

    def alloc_managed(self, size: int, ordinal: int) -> int:
        with self._in_context(ordinal):
            return int(self._api.call("cuMemAllocManaged", size, _ATTACH_GLOBAL))

    def alloc_device(self, size: int, ordinal: int) -> int:
        with self._in_context(ordinal):
            return int(self._api.call("cuMemAlloc", size))

    def free(self, address: int, ordinal: int) -> None:
        with self._in_context(ordinal):
            self._api.call("cuMemFree", address)

    def register_host(self, address: int, size: int, ordinal: int) -> None:
        with self._in_context(ordinal):
            self._api.call("cuMemHostRegister", address, size, _PORTABLE_AND_MAPPED)

    def unregister_host(self, address: int, ordinal: int) -> None:
        with self._in_context(ordinal):
            self._api.call("cuMemHostUnregister", address)

    def pointer_kind(self, address: int) -> PointerKind:
        with self._in_context(self.home):
            code, kind = self._api.ask("cuPointerGetAttribute", self._api.pointer_attribute(_MEMORY_TYPE), address)
            if code == _INVALID_VALUE:
                return "unknown"
            self._api.check("cuPointerGetAttribute", code)
            if int(self._api.call("cuPointerGetAttribute", self._api.pointer_attribute(_IS_MANAGED), address)):
                return "managed"
        return "host" if int(kind) == _HOST_MEMORY else "device"

    def physical_location(self, address: int) -> Location | None:
        with self._in_context(self.home):
            code, handle = self._api.ask("cuMemRetainAllocationHandle", address)
            if code == _INVALID_VALUE:
                return None
            self._api.check("cuMemRetainAllocationHandle", code)
            try:
                found = self._api.call("cuMemGetAllocationPropertiesFromHandle", handle).location
                return self._api.location_from(int(found.type), lambda: int(found.id))
            finally:
                self._api.call("cuMemRelease", handle)

    # -- placement ---------------------------------------------------------------------------------------

    def advise(self, span: Span, advice: Advice, where: Location) -> None:
        with self._in_context(where.index if where.kind == "device" else self.home):
            self._api.advise(*span, int(advice), self._api.location(where))

    def prefetch(self, spans: Sequence[Span], where: Location, stream: int) -> None:
        if not spans:
            return
        with self._in_context(where.index if where.kind == "device" else self.home):
            self._api.prefetch(spans, self._api.location(where), stream)

    def range_state(self, span: Span) -> RangeState:
        with self._in_context(self.home):
            accessors = self._range(span, _ACCESSED_BY, 4 * _MOST_ACCESSORS)
            return RangeState(
                preferred=self._range_location(span, _PREFERRED_TYPE, _PREFERRED),
                last_prefetch=self._range_location(span, _LAST_PREFETCH_TYPE, _LAST_PREFETCH),
                read_mostly=bool(self._range(span, _READ_MOSTLY, 4)),
                accessed_by=tuple(found for found in map(_from_device_id, accessors) if found is not None),
            )

    def _range(self, span: Span, attribute: int, size: int) -> Any:
        return self._api.call("cuMemRangeGetAttribute", size, self._api.range_attribute(attribute), *span)

    def _range_location(self, span: Span, type_attribute: int, device_attribute: int) -> Location | None:
        """By type and id where the driver knows these (a CPU node is told from the host); else by device number."""
        code, kind = self._api.ask_range(type_attribute, *span)
        if code == _INVALID_VALUE:
            return _from_device_id(int(self._range(span, device_attribute, 4)))
        self._api.check("cuMemRangeGetAttribute", code)
        return self._api.location_from(int(kind), lambda: int(self._range(span, type_attribute + 1, 4)))

    # -- order -------------------------------------------------------------------------------------------

    def create_stream(self, ordinal: int) -> int:
        with self._in_context(ordinal):
            return int(self._api.call("cuStreamCreate", _NON_BLOCKING))

    def destroy_stream(self, stream: int, ordinal: int) -> None:
        with self._in_context(ordinal):
            self._api.call("cuStreamDestroy", stream)

    def synchronize_stream(self, stream: int, ordinal: int) -> None:
        with self._in_context(ordinal):
            self._api.call("cuStreamSynchronize", stream)

    def create_event(self, ordinal: int) -> int:
        with self._in_context(ordinal):
            return int(self._api.call("cuEventCreate", _NO_TIMING))

    def destroy_event(self, event: int, ordinal: int) -> None:
        with self._in_context(ordinal):
            self._api.call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int, ordinal: int) -> None:
        with self._in_context(ordinal):
            self._api.call("cuEventRecord", event, stream)

    def event_done(self, event: int, ordinal: int) -> bool:
        with self._in_context(ordinal):
            code, _ = self._api.ask("cuEventQuery", event)
        if code == _NOT_READY:
            return False
        self._api.check("cuEventQuery", code)
        return True

    def wait_event(self, stream: int, event: int, ordinal: int) -> None:
        with self._in_context(ordinal):
            self._api.call("cuStreamWaitEvent", stream, event, 0)

    def copy(self, copies: Sequence[Copy], stream: int, ordinal: int) -> None:
        with self._in_context(ordinal):
            for destination, source, size in copies:
                self._api.call("cuMemcpyAsync", destination, source, size, stream)

    def copy_seconds(self, copy: Copy, ordinal: int) -> float:
        with self._in_context(ordinal), ExitStack() as given_back:
            stream = self._api.call("cuStreamCreate", _NON_BLOCKING)
            given_back.callback(self._api.call, "cuStreamDestroy", stream)
            before, after = self._timed_event(given_back), self._timed_event(given_back)
            self._api.call("cuEventRecord", before, stream)
            self._api.call("cuMemcpyAsync", *copy, stream)
            self._api.call("cuEventRecord", after, stream)
            self._api.call("cuEventSynchronize", after)
            return float(self._api.call("cuEventElapsedTime", before, after)) / 1000

    def _timed_event(self, given_back: ExitStack) -> Any:
        event = self._api.call("cuEventCreate", 0)
        given_back.callback(self._api.call, "cuEventDestroy", event)
        return event

    # -- contexts ----------------------------------------------------------------------------------------

    @contextmanager
    def _in_context(self, ordinal: int) -> Iterator[None]:
        """The device's primary context is current inside, and whatever was current before is again afterwards."""
        self._refuse_fork()
        context = self._context(ordinal)
        if int(self._api.call("cuCtxGetCurrent")) == int(context):
            yield
            return
        self._api.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._api.call("cuCtxPopCurrent")

    def _context(self, ordinal: int) -> Any:
        with self._lock:
            if ordinal not in self._contexts:
                # Kept until the process ends, as PyTorch does: releasing it under its tensors would destroy them.
                self._contexts[ordinal] = self._api.call("cuDevicePrimaryCtxRetain", ordinal)
            return self._contexts[ordinal]

    def _refuse_fork(self) -> None:
        if not self.owns_this_process:
            raise MemoryRoomError(
                f"process {os.getpid()} was forked from {self._pid}, to which the CUDA state belongs",
                remedy="use CUDA in the training process only, or start workers with spawn",
            )


def _from_device_id(number: int) -> Location | None:
    if number == _NO_DEVICE:
        return None
    return Location("host") if number == _CPU_DEVICE else Location("device", number)
