"""The driver of a machine without CUDA: it says so, and refuses the rest with the reason."""

from __future__ import annotations

from typing import NoReturn

from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver.interface import Capabilities, Copy, Location, PointerKind, Span
from simpletuner_gh200.memory.mapping import PAGE

NOT_SUPPORTED = 801


class NullDriver:
    """``device_count()`` is 0: nobody mistakes it for a GPU."""

    name = "null"
    home = 0

    def __init__(self, reason: str = "the null driver was chosen") -> None:
        self.reason = reason

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

    def pointer_kind(self, address: int) -> PointerKind:
        return "unknown"

    def physical_location(self, address: int) -> Location | None:
        return None

    def alloc_managed(self, size: int, ordinal: int) -> int:
        self._refuse("alloc_managed")

    def alloc_device(self, size: int, ordinal: int) -> int:
        self._refuse("alloc_device")

    def free(self, address: int, ordinal: int) -> None:
        self._refuse("free")

    def register_host(self, address: int, size: int, ordinal: int) -> None:
        self._refuse("register_host")

    def unregister_host(self, address: int, ordinal: int) -> None:
        self._refuse("unregister_host")

    def prefer(self, span: Span, where: Location, mapped_for: Location | None = None) -> None:
        self._refuse("prefer")

    def prefetch(self, span: Span, where: Location, stream: int) -> None:
        self._refuse("prefetch")

    def copy_seconds(self, copy: Copy, ordinal: int) -> float:
        self._refuse("copy_seconds")

    def _refuse(self, name: str) -> NoReturn:
        raise DriverError(name, NOT_SUPPORTED, "NOT_SUPPORTED", remedy=f"not possible here: {self.reason}")
