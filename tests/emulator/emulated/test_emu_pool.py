"""The C allocator of the pool, driven as torch drives it: limit, advice by pattern, failures, threads, fork."""

from __future__ import annotations

import os
import threading

import pytest

from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.driver.interface import HOST, Location, device
from simpletuner_gh200.memory.pool.pool import Allocator, Pattern
from tests.emulator.emulation import Emulator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("pattern", "preferred", "mapped_for"),
    [("gpu_first", device(0), HOST), ("balanced", None, device(0)), ("cpu_first", HOST, device(0))],
)
def test_advice_by_pattern(
    driver: CudaDriver, emulator: Emulator, pattern: Pattern, preferred: Location | None, mapped_for: Location
) -> None:
    allocator = Allocator(8 * MIB, pattern)
    address = allocator.alloc(2 * MIB, 0)
    assert address is not None
    state = driver.range_state((address, 2 * MIB))
    assert state.preferred == preferred
    assert mapped_for in state.accessed_by
    assert driver.pointer_kind(address) == "managed"
    allocator.free(address, 2 * MIB, 0)


def test_more_than_hbm_up_to_the_limit_then_null(emulator: Emulator) -> None:
    emulator.set_hbm(4 * MIB)
    allocator = Allocator(10 * MIB, "gpu_first")
    held = [allocator.alloc(2 * MIB, 0) for _ in range(5)]
    assert all(held), "five times two is more than the device has, and within the ratio"
    refused = allocator.state().refused
    assert allocator.alloc(1, 0) is None
    state = allocator.state()
    assert (state.held, state.limit, state.refused) == (10 * MIB, 10 * MIB, refused + 1)
    for address in held:
        assert address is not None
        allocator.free(address, 2 * MIB, 0)
    assert allocator.state().held == 0


def test_a_failing_driver_is_null_and_counted(emulator: Emulator) -> None:
    allocator = Allocator(8 * MIB, "gpu_first")
    emulator.fail("cuMemAllocManaged", 1, 2)
    assert allocator.alloc(MIB, 0) is None
    assert allocator.state().last_error == 2
    assert allocator.state().held == 0
    emulator.fail("cuMemAdvise", 1, 1)
    unadvised = allocator.state().unadvised
    address = allocator.alloc(MIB, 0)
    assert address is not None, "memory without advice is still memory"
    assert allocator.state().unadvised == unadvised + 1
    allocator.free(address, MIB, 0)


def test_threads_share_one_limit(emulator: Emulator) -> None:
    allocator = Allocator(16 * MIB, "balanced")
    found: list[int | None] = []

    def work() -> None:
        for _ in range(8):
            found.append(allocator.alloc(MIB, 0))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [address for address in found if address is not None]
    assert len(held) == 16
    assert len(found) == 32
    for address in held:
        allocator.free(address, MIB, 0)
    assert allocator.state().held == 0


def test_a_forked_child_gets_null_and_frees_nothing(emulator: Emulator) -> None:
    allocator = Allocator(8 * MIB, "gpu_first")
    address = allocator.alloc(MIB, 0)
    assert address is not None
    pid = os.fork()
    if pid == 0:
        refused = allocator.alloc(MIB, 0) is None
        allocator.free(address, MIB, 0)
        os._exit(0 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    allocator.free(address, MIB, 0)
    assert allocator.state().held == 0
