"""What the rest of the package may ask of a memory driver, and the one of a machine without CUDA.

Streams, events and copies beside the computation are torch's own (``memory/lane.py``); here is what torch has not.
Addresses are plain integers. Every call either succeeds or raises ``DriverError``; none keeps a mirror of what the
driver knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.mapping import PAGE

NOT_SUPPORTED = 801
COPIES = 5
"""Each way, to find a rate; the first of them may be slow, since it touches the pages."""


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
    mode: MemoryMode
    managed: bool = False
    concurrent_managed: bool = False
    pageable_access: bool = False
    host_page_tables: bool = False
    direct_managed_from_host: bool = False
    host_register: bool = False
    integrated: bool = False
    device_total: int = 0
    page_size: int = PAGE
    host_node: int | None = None
    """CPU NUMA node next to the device, where the driver says."""
    device_node: int | None = None
    """NUMA node that the device's own memory is, where it is one: nothing of ours may spill into it."""
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


class Driver:
    """Calls are safe from any thread. Whatever a driver has not, it refuses, with the reason."""

    name: str
    home = 0
    """The device of this rank: what is meant where nobody names one."""
    reason = "this driver can't"

    def device_count(self) -> int:
        return 0

    def capabilities(self, ordinal: int) -> Capabilities:
        return Capabilities(ordinal, "no device", "none", absence=self.reason)

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        return 0, 0

    def pointer_kind(self, address: int) -> PointerKind:
        return "unknown"

    def physical_location(self, address: int) -> Location | None:
        """Where memory of the virtual memory calls is; None for memory of any other kind."""
        return None

    def alloc_managed(self, size: int, ordinal: int) -> int:
        self._refuse("alloc_managed")

    def alloc_device(self, size: int, ordinal: int) -> int:
        self._refuse("alloc_device")

    def free(self, address: int, ordinal: int) -> None:
        """Give back managed or device memory."""
        self._refuse("free")

    def register_host(self, address: int, size: int, ordinal: int) -> None:
        self._refuse("register_host")

    def unregister_host(self, address: int, ordinal: int) -> None:
        self._refuse("unregister_host")

    def prefer(self, span: Span, where: Location, mapped_for: Location | None = None) -> None:
        """Advise the pages to stay there, mapped so that ``mapped_for`` reads them without moving them."""
        self._refuse("prefer")

    def prefetch(self, span: Span, where: Location, stream: int) -> None:
        """Move the pages, behind what is queued on ``stream``, and wait: only the kernel tells where they are."""
        self._refuse("prefetch")

    def copy_seconds(self, copy: Copy, ordinal: int) -> float:
        """How long a copy takes on a stream of its own, by the device's clock; waits for it."""
        self._refuse("copy_seconds")

    def copy_rates(self, address: int, size: int, ordinal: int) -> tuple[float, float]:
        """Bytes per second from so much host memory to the device, and back: the best of several copies each way."""
        near = self.alloc_device(size, ordinal)
        try:
            turns = [[(near, address, size), (address, near, size)]] * COPIES
            seconds = [[self.copy_seconds(copy, ordinal) for copy in turn] for turn in turns]
        finally:
            self.free(near, ordinal)
        there, back = (size / max(min(ways), 1e-9) for ways in zip(*seconds, strict=True))
        return there, back

    def _refuse(self, name: str) -> NoReturn:
        raise DriverError(name, NOT_SUPPORTED, "NOT_SUPPORTED", remedy=f"not possible here: {self.reason}")


class NullDriver(Driver):
    """Of a machine without CUDA. ``device_count()`` is 0: nobody mistakes it for a GPU."""

    name = "null"

    def __init__(self, reason: str = "the null driver was chosen") -> None:
        self.reason = reason
