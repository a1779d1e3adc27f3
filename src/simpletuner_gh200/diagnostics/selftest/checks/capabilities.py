"""Each capability is read, and tried where possible: a flag that promises what a call refuses is found out."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.selftest.check import Bench, SelfCheck, expect
from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver.interface import HOST, Advice, device
from simpletuner_gh200.memory.mapping import PAGE, map_anonymous
from simpletuner_gh200.units import MIB, format_bytes


def _managed(bench: Bench) -> str:
    bench.need_device()
    bench.need(bench.caps.managed, "the device has no managed memory")
    address = bench.driver.alloc_managed(MIB, bench.ordinal)
    try:
        expect(bench.driver.pointer_kind(address) == "managed", "managed memory is not known as managed")
    finally:
        bench.driver.free(address, bench.ordinal)
    return "allocated, recognized, freed"


def _concurrent(bench: Bench) -> str:
    bench.need_device()
    bench.need(bench.caps.managed, "the device has no managed memory")
    address = bench.driver.alloc_managed(MIB, bench.ordinal)
    try:
        bench.driver.advise((address, MIB), Advice.SET_ACCESSED_BY, device(bench.ordinal))
        accepted = True
    except DriverError:
        accepted = False
    finally:
        bench.driver.free(address, bench.ordinal)
    expect(
        accepted == bench.caps.concurrent_managed, f"the flag says {bench.caps.concurrent_managed}, advice {accepted}"
    )
    return f"{accepted}, as the flag says"


def _system_memory(bench: Bench) -> str:
    bench.need_device()
    region = map_anonymous(MIB)
    region.array()[:] = 1
    try:
        bench.driver.advise((region.address, MIB), Advice.SET_PREFERRED_LOCATION, HOST)
        accepted = True
    except DriverError:
        accepted = False
    # With page tables of its own too: on x86 the kernel (HMM) brings pageable memory to the device, advice included.
    claimed = bench.caps.pageable_access
    expect(accepted == claimed, f"pageable access: {claimed}; advice on system memory accepted: {accepted}")
    return f"advice on system memory {'accepted' if accepted else 'refused'}, as the flags say"


def _pageable(bench: Bench) -> str:
    bench.need_device()
    caps = bench.caps
    expect(caps.pageable_access or not caps.host_page_tables, "shared page tables without pageable access")
    return f"pageable access {caps.pageable_access}, host page tables {caps.host_page_tables}"


def _direct(bench: Bench) -> str:
    bench.need_device()
    caps = bench.caps
    expect(caps.managed or not caps.direct_managed_from_host, "direct access to managed memory without managed memory")
    return f"{caps.direct_managed_from_host}"


def _register(bench: Bench) -> str:
    bench.need_device()
    bench.need(bench.caps.host_register, "the device can't register host memory")
    region = map_anonymous(MIB)
    bench.driver.register_host(region.address, MIB, bench.ordinal)
    try:
        expect(bench.driver.pointer_kind(region.address) == "host", "registered memory is not known as host memory")
    finally:
        bench.driver.unregister_host(region.address, bench.ordinal)
    return "registered, recognized, given back"


def _total(bench: Bench) -> str:
    bench.need_device()
    free, total = bench.driver.memory_info(bench.ordinal)
    expect(0 < free <= total, f"{format_bytes(free)} free of {format_bytes(total)}")
    expect(total <= bench.caps.device_total * 1.02, f"total {total}, by the device {bench.caps.device_total}")
    return f"{format_bytes(free)} free of {format_bytes(total)}"


def _mode(bench: Bench) -> str:
    bench.need_device()
    caps = bench.caps
    expect((caps.mode == "single pool") == caps.integrated, f"mode {caps.mode}, integrated {caps.integrated}")
    expect((caps.mode == "numa") == (caps.device_node is not None), f"mode {caps.mode}, node {caps.device_node}")
    return f"{caps.mode}, next to CPU node {caps.host_node}"


def _page(bench: Bench) -> str:
    expect(bench.caps.page_size == PAGE, f"{bench.caps.page_size} by the driver, {PAGE} by the kernel")
    return format_bytes(PAGE)


CHECKS = (
    SelfCheck("capability.managed", "managed memory can be allocated and is recognized", _managed),
    SelfCheck("capability.concurrent_managed", "concurrent managed access is what the flag says", _concurrent),
    SelfCheck("capability.pageable_access", "pageable access and page tables agree", _pageable),
    SelfCheck(
        "capability.host_page_tables",
        "system memory takes advice where the device reaches it",
        _system_memory,
    ),
    SelfCheck("capability.direct_managed", "direct access to managed memory is consistent", _direct),
    SelfCheck("capability.host_register", "host memory can be registered and is recognized", _register),
    SelfCheck("capability.device_total", "free and total memory make sense", _total),
    SelfCheck("capability.mode", "memory mode, integration and NUMA node agree", _mode),
    SelfCheck("capability.page_size", "page size is the kernel's", _page),
)
