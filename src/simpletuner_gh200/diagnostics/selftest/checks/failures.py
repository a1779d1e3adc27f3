"""Failures that any device can be provoked to: each is an error with call and code, and leaves things usable."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

from simpletuner_gh200.diagnostics.selftest.check import Bench, SelfCheck, expect
from simpletuner_gh200.errors import DriverError, MemoryRoomError
from simpletuner_gh200.memory.driver.interface import HOST, Advice
from simpletuner_gh200.memory.mapping import map_anonymous
from simpletuner_gh200.memory.pool.pool import Allocator, Mechanism
from simpletuner_gh200.units import MIB, format_bytes


def _refused(act: Callable[[], object], *codes: int) -> str:
    try:
        act()
    except DriverError as failed:
        expect(failed.code in codes, f"{failed.message}; expected one of {codes}")
        return failed.message
    expect(False, "the driver accepted it")
    return ""


def _out_of_memory(bench: Bench) -> str:
    bench.need_device()
    before, _ = bench.driver.memory_info(bench.ordinal)
    message = _refused(lambda: bench.driver.alloc_device(4 * bench.caps.device_total, bench.ordinal), 2)
    after, _ = bench.driver.memory_info(bench.ordinal)
    expect(after >= before - 64 * MIB, f"{format_bytes(before - after)} are gone")
    bench.driver.free(bench.driver.alloc_device(MIB, bench.ordinal), bench.ordinal)
    return message


def _double_free(bench: Bench) -> str:
    bench.need_device()
    address = bench.driver.alloc_device(MIB, bench.ordinal)
    bench.driver.free(address, bench.ordinal)
    return _refused(lambda: bench.driver.free(address, bench.ordinal), 1)


def _double_register(bench: Bench) -> str:
    bench.need_device()
    bench.need(bench.caps.host_register, "the device can't register host memory")
    region = map_anonymous(MIB)
    bench.driver.register_host(region.address, MIB, bench.ordinal)
    try:
        return _refused(lambda: bench.driver.register_host(region.address, MIB, bench.ordinal), 712)
    finally:
        bench.driver.unregister_host(region.address, bench.ordinal)


def _not_registered(bench: Bench) -> str:
    bench.need_device()
    region = map_anonymous(MIB)
    return _refused(lambda: bench.driver.unregister_host(region.address, bench.ordinal), 713, 1)


def _wrong_memory(bench: Bench) -> str:
    bench.need_device()
    address = bench.driver.alloc_device(MIB, bench.ordinal)
    try:
        return _refused(lambda: bench.driver.advise((address, MIB), Advice.SET_PREFERRED_LOCATION, HOST), 1)
    finally:
        bench.driver.free(address, bench.ordinal)


def _fork(bench: Bench) -> str:
    bench.need_device()
    bench.driver.device_count()
    child = os.fork()
    if child == 0:
        try:
            bench.driver.alloc_managed(MIB, bench.ordinal)
        except MemoryRoomError:
            os._exit(0)
        os._exit(1)
    expect(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a forked child reached the driver")
    return "a forked child is refused"


def _pool_limit(bench: Bench) -> str:
    bench.need_device()
    mechanism: Mechanism = "host" if bench.caps.maps_host_memory else "managed"
    bench.need(bench.caps.maps_host_memory or bench.caps.managed, "the device reaches no host memory")
    allocator = Allocator(mechanism, limit=4 * MIB)
    address = allocator.alloc(4 * MIB, bench.ordinal)
    expect(address is not None, f"the pool gave nothing, error {allocator.state().last_error}")
    assert address is not None
    over = allocator.alloc(1, bench.ordinal)
    allocator.free(address, 4 * MIB, bench.ordinal)
    gc.collect()
    expect(over is None, "the pool gave more than its limit")
    expect(allocator.state().held == 0, f"{format_bytes(allocator.state().held)} are still held")
    return "limit kept, memory given back"


CHECKS = (
    SelfCheck("failure.out_of_memory", "out of memory is an error and leaves the device usable", _out_of_memory),
    SelfCheck("failure.double_free", "freeing twice is an error", _double_free),
    SelfCheck("failure.double_register", "registering twice is an error", _double_register),
    SelfCheck("failure.not_registered", "unregistering what isn't is an error", _not_registered),
    SelfCheck("failure.wrong_memory", "advice on ordinary device memory is an error", _wrong_memory),
    SelfCheck("failure.fork", "a forked child never touches the driver", _fork),
    SelfCheck("failure.pool_limit", "the pool of Grace memory keeps its limit", _pool_limit),
)
