"""What the device says it can do is tried where possible; what it must refuse is refused, and leaves things usable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simpletuner_gh200.diagnostics.check import Bench, expect, self_check
from simpletuner_gh200.errors import DriverError, MemoryRoomError
from simpletuner_gh200.memory import advice
from simpletuner_gh200.memory.driver.interface import HOST
from simpletuner_gh200.memory.mapping import Region, map_anonymous
from simpletuner_gh200.memory.pool.pool import Allocator
from simpletuner_gh200.units import MIB, format_bytes


@contextmanager
def _on_device(bench: Bench) -> Iterator[int]:
    address = bench.driver.alloc_device(MIB, bench.ordinal)
    try:
        yield address
    finally:
        bench.driver.free(address, bench.ordinal)


def _system_memory(bench: Bench) -> Region:
    region = map_anonymous(MIB)
    region.array()[:] = 1
    return region


# -- capabilities ------------------------------------------------------------------------------------------------


def _managed(bench: Bench) -> str:
    bench.need(bench.caps.managed, "the device has no managed memory")
    address = bench.driver.alloc_managed(MIB, bench.ordinal)
    try:
        expect(bench.driver.pointer_kind(address) == "managed", "managed memory is not known as managed")
    finally:
        bench.driver.free(address, bench.ordinal)
    return "allocated, recognized, freed"


def _takes_advice(bench: Bench) -> str:
    region = _system_memory(bench)
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


def _total(bench: Bench) -> str:
    free, total = bench.driver.memory_info(bench.ordinal)
    expect(0 < free <= total, f"{format_bytes(free)} free of {format_bytes(total)}")
    expect(total <= bench.caps.device_total * 1.02, f"total {total}, by the device {bench.caps.device_total}")
    return f"{format_bytes(free)} free of {format_bytes(total)}"


def _mode(bench: Bench) -> str:
    caps = bench.caps
    expect((caps.mode == "single pool") == caps.integrated, f"mode {caps.mode}, integrated {caps.integrated}")
    expect((caps.mode == "numa") == (caps.device_node is not None), f"mode {caps.mode}, node {caps.device_node}")
    return f"{caps.mode}, next to CPU node {caps.host_node}"


# -- advice ------------------------------------------------------------------------------------------------------


def _moved_system_memory(bench: Bench) -> str:
    region = _system_memory(bench)
    outcome = advice.prefetch(bench.driver, bench.caps, (region.address, MIB), 0)
    # An emulated device moves no real pages, and the kernel reports that: the outcome must not claim otherwise.
    movable = bench.caps.mode == "numa" and bench.caps.advises_system_memory and not bench.emulated
    expect(bool(outcome) == movable, outcome.reason)
    return outcome.reason


def _device_memory(bench: Bench) -> str:
    with _on_device(bench) as address:
        outcome = advice.prefer(bench.driver, bench.caps, (address, MIB), "cpu")
    expect(not outcome and "caching allocator" in outcome.reason, outcome.reason)
    return "refused, and explained"


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
    with _on_device(bench):
        return message


def _fork(bench: Bench) -> str:
    bench.driver.device_count()
    child = os.fork()
    if child == 0:
        try:
            bench.driver.alloc_device(MIB, bench.ordinal)
        except MemoryRoomError:
            os._exit(0)
        os._exit(1)
    expect(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a forked child reached the driver")
    return "a forked child is refused"


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
    self_check("capability.managed", "managed memory can be allocated and is recognized", _managed, DEVICE),
    self_check(
        "capability.host_page_tables", "system memory takes advice where the device reaches it", _takes_advice, DEVICE
    ),
    self_check("capability.host_register", "host memory can be registered, once, and is recognized", _register, DEVICE),
    self_check("capability.device_total", "free and total memory make sense", _total, DEVICE),
    self_check("capability.mode", "memory mode, integration and NUMA node agree", _mode, DEVICE),
    self_check("advice.system_memory", "system memory follows the machine's mode", _moved_system_memory, DEVICE),
    self_check(
        "advice.device_memory", "memory of the caching allocator is refused with the reason", _device_memory, DEVICE
    ),
    self_check(
        "failure.out_of_memory", "out of memory is an error and leaves the device usable", _out_of_memory, DEVICE
    ),
    self_check("failure.fork", "a forked child never touches the driver", _fork, DEVICE),
    self_check("failure.pool_limit", "the pool of Grace memory keeps its limit", _pool_limit, DEVICE),
)
