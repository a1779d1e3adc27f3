"""Asking a device what it can do: every capability a separate question, none inferred from its name."""

from __future__ import annotations

from simpletuner_gh200.memory.driver.bindings import Bindings
from simpletuner_gh200.memory.driver.interface import Capabilities, MemoryMode
from simpletuner_gh200.memory.mapping import PAGE


def probe(api: Bindings, ordinal: int) -> Capabilities:
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
        page_size=PAGE,
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
