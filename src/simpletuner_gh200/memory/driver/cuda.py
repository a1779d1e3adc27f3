"""The CUDA driver through NVIDIA's own bindings (``cuda-bindings`` 12.8 to 13.x), driver API only.

The runtime half of the bindings embeds a second CUDA runtime, so it stays out. Each call runs in the device's primary
context, the one PyTorch uses, and leaves the calling thread's context as it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.driver.bindings import Bindings
from simpletuner_gh200.memory.driver.interface import (
    Capabilities,
    Copy,
    Driver,
    Location,
    MemoryMode,
    PointerKind,
    Span,
)

_INVALID_VALUE = 1
_ATTACH_GLOBAL = 1
_PORTABLE_AND_MAPPED = 1 | 2
_NON_BLOCKING = 1
_MEMORY_TYPE, _IS_MANAGED = 2, 8
_HOST_MEMORY = 1
_SET_PREFERRED_LOCATION, _SET_ACCESSED_BY = 3, 5


class CudaDriver(Driver):
    """One per process. Raises DriverError when there is no driver or no device; a forked child is refused.

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
        free, total = self._call(ordinal, "cuMemGetInfo")
        return int(free), int(total)

    # -- memory ------------------------------------------------------------------------------------------

    def alloc_managed(self, size: int, ordinal: int) -> int:
        return int(self._call(ordinal, "cuMemAllocManaged", size, _ATTACH_GLOBAL))

    def alloc_device(self, size: int, ordinal: int) -> int:
        return int(self._call(ordinal, "cuMemAlloc", size))

    def free(self, address: int, ordinal: int) -> None:
        self._call(ordinal, "cuMemFree", address)

    def register_host(self, address: int, size: int, ordinal: int) -> None:
        self._call(ordinal, "cuMemHostRegister", address, size, _PORTABLE_AND_MAPPED)

    def unregister_host(self, address: int, ordinal: int) -> None:
        self._call(ordinal, "cuMemHostUnregister", address)

    def _call(self, ordinal: int, name: str, *arguments: Any) -> Any:
        with self._in_context(ordinal):
            return self._api.call(name, *arguments)

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
                return self._api.location_from(
                    self._api.call("cuMemGetAllocationPropertiesFromHandle", handle).location
                )
            finally:
                self._api.call("cuMemRelease", handle)

    def prefer(self, span: Span, where: Location, mapped_for: Location | None = None) -> None:
        with self._in_context(self.home):
            self._advise(span, _SET_PREFERRED_LOCATION, where)
            if mapped_for is not None:
                self._advise(span, _SET_ACCESSED_BY, mapped_for)

    def _advise(self, span: Span, advice: int, where: Location) -> None:
        self._api.call(self._api.advise, *span, self._api.advice(advice), self._api.location(where))

    def prefetch(self, span: Span, where: Location, stream: int) -> None:
        with self._in_context(where.index if where.kind == "device" else self.home):
            self._api.call(self._api.prefetch, *span, self._api.location(where), 0, stream)
            self._api.call("cuStreamSynchronize", stream)

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
        if os.getpid() != self._pid:  # a child must leave the parent's CUDA state alone
            raise MemoryRoomError(
                f"process {os.getpid()} was forked from {self._pid}, to which the CUDA state belongs",
                remedy="use CUDA in the training process only, or start workers with spawn",
            )


def probe(api: Bindings, ordinal: int) -> Capabilities:
    """Every capability a question of its own, none inferred from the device's name."""

    def has(name: str) -> bool:
        return bool(api.device_attribute(name, ordinal))

    integrated, pageable = has("INTEGRATED"), has("PAGEABLE_MEMORY_ACCESS")
    page_tables = has("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")
    return Capabilities(
        ordinal=ordinal,
        name=_text(api.call("cuDeviceGetName", 256, ordinal)),
        managed=has("MANAGED_MEMORY"),
        concurrent_managed=has("CONCURRENT_MANAGED_ACCESS"),
        pageable_access=pageable,
        host_page_tables=page_tables,
        direct_managed_from_host=has("DIRECT_MANAGED_MEM_ACCESS_FROM_HOST"),
        host_register=has("HOST_REGISTER_SUPPORTED"),
        integrated=integrated,
        device_total=int(api.call("cuDeviceTotalMem", ordinal)),
        host_node=_node(api.device_attribute("HOST_NUMA_ID", ordinal)),
        device_node=_node(api.device_attribute("NUMA_ID", ordinal)) if has("NUMA_CONFIG") else None,
        mode=memory_mode(
            integrated=integrated, shares_page_tables=pageable and page_tables, is_node=has("NUMA_CONFIG")
        ),
        driver_version=int(api.call("cuDriverGetVersion")),
        maps_host_memory=has("CAN_MAP_HOST_MEMORY"),
        node_vmm=has("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED") and has("HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
        registered_in_place=has("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"),
    )


def memory_mode(*, integrated: bool, shares_page_tables: bool, is_node: bool) -> MemoryMode:
    """How the device's memory relates to the operating system's."""
    if integrated:
        return "single pool"
    if is_node:
        return "numa"
    return "cdmm" if shares_page_tables else "discrete"


def _node(number: int | None) -> int | None:
    return number if number is not None and number >= 0 else None


def _text(raw: bytes | str) -> str:
    return raw.split(b"\0")[0].decode(errors="replace") if isinstance(raw, bytes) else raw
