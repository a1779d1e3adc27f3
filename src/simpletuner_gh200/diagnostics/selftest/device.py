"""What the device says it can do is tried where possible; what it must refuse is refused, and leaves things usable."""

from __future__ import annotations

from collections.abc import Callable

from simpletuner_gh200.diagnostics.check import Bench, expect, self_check
from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver.interface import HOST
from simpletuner_gh200.memory.mapping import map_anonymous
from simpletuner_gh200.memory.pool.pool import Allocator
from simpletuner_gh200.units import MIB, format_bytes

# -- capabilities ------------------------------------------------------------------------------------------------


def _takes_advice(bench: Bench) -> str:
    region = map_anonymous(MIB)
    region.array()[:] = 1
    try:
        bench.driver.prefer((region.address, MIB), HOST)
        accepted = True
    except DriverError:
        accepted = False
    # With page tables of its own too: on x86 the kernel (HMM) brings pageable memory to the device, advice included.
    claimed = bench.caps.pageable_access
    expect(accepted == claimed, f"pageable access: {claimed}; advice on system memory accepted: {accepted}")
    return f"advice on system memory {'accepted' if accepted else 'refused'}, as the flags say"


def _register(bench: Bench) -> str:
    bench.need(bench.caps.host_register, "the device can't register host memory")
    region = map_anonymous(MIB)
    bench.driver.register_host(region.address, MIB, bench.ordinal)
    try:
        expect(bench.driver.pointer_kind(region.address) == "host", "registered memory is not known as host memory")
        _refused(lambda: bench.driver.register_host(region.address, MIB, bench.ordinal), 712)
    finally:
        bench.driver.unregister_host(region.address, bench.ordinal)
    return "registered, recognized, refused twice, given back"


# -- failures ----------------------------------------------------------------------------------------------------


def _refused(act: Callable[[], object], *codes: int) -> str:
    try:
        act()
    except DriverError as failed:
        expect(failed.code in codes, f"{failed.message}; expected one of {codes}")
        return failed.message
    expect(False, "the driver accepted it")
    return ""


def _out_of_memory(bench: Bench) -> str:
    before, _ = bench.driver.memory_info(bench.ordinal)
    message = _refused(lambda: bench.driver.alloc_device(4 * bench.caps.device_total, bench.ordinal), 2)
    after, _ = bench.driver.memory_info(bench.ordinal)
    expect(after >= before - 64 * MIB, f"{format_bytes(before - after)} are gone")
    bench.driver.free(bench.driver.alloc_device(MIB, bench.ordinal), bench.ordinal)
    return message


def _pool_limit(bench: Bench) -> str:
    bench.need(bench.caps.maps_host_memory, "the device can't map host memory")
    allocator = Allocator("host", limit=4 * MIB)
    address = allocator.alloc(4 * MIB, bench.ordinal)
    expect(address is not None, f"the pool gave nothing, error {allocator.state().last_error}")
    assert address is not None
    over = allocator.alloc(1, bench.ordinal)
    allocator.free(address, 4 * MIB, bench.ordinal)
    expect(over is None, "the pool gave more than its limit")
    expect(allocator.state().held == 0, f"{format_bytes(allocator.state().held)} are still held")
    return "limit kept, memory given back"


DEVICE = Bench.need_device
CHECKS = (
    self_check(
        "capability.host_page_tables", "system memory takes advice where the device reaches it", _takes_advice, DEVICE
    ),
    self_check("capability.host_register", "host memory can be registered, once, and is recognized", _register, DEVICE),
    self_check(
        "failure.out_of_memory", "out of memory is an error and leaves the device usable", _out_of_memory, DEVICE
    ),
    self_check("failure.pool_limit", "the pool of Grace memory keeps its limit", _pool_limit, DEVICE),
)
