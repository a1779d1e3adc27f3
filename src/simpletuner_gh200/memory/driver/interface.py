"""What the rest of the package may ask of a memory driver: a small interface, implemented by ``cuda`` and ``null``.

Streams, events and copies beside the computation are torch's own (``memory/lane.py``); here is what torch has not.
Addresses are plain integers. Every call either succeeds or raises ``DriverError``; none keeps a mirror of what the
driver knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Location:
    """Where bytes may live: ``host`` (any CPU node), ``node`` (one CPU NUMA node) or ``device``."""

    kind: Literal["host", "node", "device"]
    index: int = 0

    def __str__(self) -> str:
        return "host" if self.kind == "host" else f"{self.kind} {self.index}"


HOST = Location("host")


def device(index: int) -> Location:
    return Location("device", index)


MemoryMode = Literal["discrete", "numa", "cdmm", "single pool", "none"]
"""How device memory relates to the operating system's: behind PCIe; a NUMA node of its own; coherent but kept by the
driver (CDMM); the same physical memory; or no device at all."""


@dataclass(frozen=True)
class Capabilities:
    """Separate facts about one device, each probed by itself. ``name`` is for people only: nothing switches on it."""

    ordinal: int
    name: str
    managed: bool
    concurrent_managed: bool
    pageable_access: bool
    host_page_tables: bool
    direct_managed_from_host: bool
    host_register: bool
    integrated: bool
    device_total: int
    page_size: int
    host_node: int | None
    """CPU NUMA node next to the device, where the driver says."""
    device_node: int | None
    """NUMA node that the device's own memory is, where it is one: nothing of ours may spill into it."""
    mode: MemoryMode
    driver_version: int = 0
    registered_in_place: bool = True
    """Does the device reach registered host memory at the host's own address?"""
    maps_host_memory: bool = False
    """Can pinned host memory be mapped into the device's addresses?"""
    node_vmm: bool = False
    """Can host memory of one NUMA node be mapped by the driver's virtual memory calls?"""
    absence: str | None = None
    """Why there is no device, where ``mode`` is ``none``."""

    @property
    def advises_system_memory(self) -> bool:
        """Can plain host memory be advised and prefetched as managed memory can?"""
        return self.pageable_access and self.host_page_tables


PointerKind = Literal["managed", "host", "device", "unknown"]
"""``host`` is memory CUDA has pinned; ``unknown`` is memory CUDA knows nothing of, such as a plain mapping."""

Span = tuple[int, int]
"""(address, size)"""

Copy = tuple[int, int, int]
"""(destination, source, size)"""


class Driver(Protocol):
    """Calls are safe from any thread; a forked child is refused with ``MemoryRoomError``."""

    name: str
    home: int
    """The device of this rank: what is meant where nobody names one."""

    def device_count(self) -> int: ...

    def capabilities(self, ordinal: int) -> Capabilities: ...

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        """(free, total) bytes of the device."""

    def alloc_managed(self, size: int, ordinal: int) -> int: ...

    def alloc_device(self, size: int, ordinal: int) -> int: ...

    def free(self, address: int, ordinal: int) -> None:
        """Give back managed or device memory."""

    def register_host(self, address: int, size: int, ordinal: int) -> None: ...

    def unregister_host(self, address: int, ordinal: int) -> None: ...

    def pointer_kind(self, address: int) -> PointerKind: ...

    def physical_location(self, address: int) -> Location | None:
        """Where memory of the virtual memory calls is; None for memory of any other kind."""

    def prefer(self, span: Span, where: Location, mapped_for: Location | None = None) -> None:
        """Advise the pages to stay there, mapped so that ``mapped_for`` reads them without moving them."""

    def prefetch(self, span: Span, where: Location, stream: int) -> None:
        """Move the pages, behind what is queued on ``stream``, and wait: only the kernel tells where they are."""

    def copy_seconds(self, copy: Copy, ordinal: int) -> float:
        """How long a copy takes on a stream of its own, by the device's clock; waits for it."""
