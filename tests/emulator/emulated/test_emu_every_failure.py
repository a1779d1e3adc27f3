"""Every call that takes or asks is failed at each of its turns: a typed error or an honest result, nothing kept."""

from __future__ import annotations

import gc

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory import advice
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.budget import Budget
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.driver.interface import device
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.memory.staging.buffers import DriverBuffers
from simpletuner_gh200.memory.staging.layout import Range
from simpletuner_gh200.memory.staging.stager import DeviceStager
from tests.emulator.emulation import Emulator

CALLS = (
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceTotalMem",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuMemGetInfo",
    "cuMemAlloc",
    "cuMemAllocManaged",
    "cuMemHostRegister",
    "cuPointerGetAttribute",
    "cuMemAdvise",
    "cuMemPrefetchAsync",
    "cuMemRangeGetAttribute",
    "cuStreamCreate",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemcpyAsync",
)
"""All but those that give something back, and the context calls, which those need too: failing these is a leak."""

NOTHING = {"managed": 0, "device": 0, "registered": 0, "streams": 0, "events": 0}


class Byte:
    itemsize = 1


def scenario(budget: Budget) -> None:
    """A slab of each kind, advice, a batch staged, all given back."""
    driver = CudaDriver()
    driver.device_count()
    driver.memory_info(0)
    for asked in ("registered", "managed"):
        with SlabMaker(driver, budget, asked=asked).make(65536, label=asked) as slab:  # type: ignore[arg-type]
            advice.prefer(driver, driver.capabilities(0), (slab.address, slab.size), "gpu")
            advice.prefetch(driver, driver.capabilities(0), (slab.address, slab.size), device(0), 0)
            stage(driver, slab)


def stage(driver: CudaDriver, slab: Slab) -> None:
    stager = DeviceStager(driver, DriverBuffers(driver), depth=1)
    try:
        ticket = stager.submit(0, [[Range(slab, 0, (4096,), Byte())]])  # type: ignore[arg-type]
        ticket.claim()
        assert ticket.address is not None or ticket.errors
    finally:
        stager.close()


def test_every_failure_at_every_turn(emulator: Emulator) -> None:
    before = {call: emulator.calls(call) for call in CALLS}
    scenario(Budget("all", 1 << 20))
    gc.collect()
    turns = {call: emulator.calls(call) - before[call] for call in CALLS}
    assert all(turns.values()), f"the scenario makes none of {[call for call, count in turns.items() if not count]}"
    raised = tried = 0
    for call, count in turns.items():
        for nth in range(1, count + 1):
            tried += 1
            raised += fails_cleanly(emulator, call, nth)
    assert tried > 50
    assert 0 < raised < tried, "some failures stop the scenario, others are absorbed with a reason"


def fails_cleanly(emulator: Emulator, call: str, nth: int) -> bool:
    budget = Budget("all", 1 << 20)
    emulator.fail(call, nth, 999)
    message = outcome(budget)
    emulator.heal()
    gc.collect()
    assert budget.used == 0, f"{call}:{nth}"
    assert emulator.held() == NOTHING, f"{call}:{nth}: {emulator.held()}"
    assert message is None or call in message, f"{call}:{nth}: {message}"
    return message is not None


def outcome(budget: Budget) -> str | None:
    """None, or the message of the typed error; any other exception goes through."""
    try:
        scenario(budget)
    except MemoryRoomError as failed:
        return str(failed)
    return None
