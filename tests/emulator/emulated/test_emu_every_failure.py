"""Every call that takes or asks is failed at each of its turns: a typed error or an honest result, nothing kept."""

from __future__ import annotations

import gc

from simpletuner_gh200.diagnostics.selftest.checks.copies import DriverMemory
from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory import advice
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.copier import Copier, SlabRange
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.driver.interface import device
from simpletuner_gh200.memory.mapping import Region
from simpletuner_gh200.memory.slab import Slab
from tests.emulator.emulation import KINDS, Emulator

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
    "cuEventQuery",
    "cuMemcpyAsync",
)
"""All but those that give something back, and the context calls, which those need too: failing these is a leak."""

NOTHING = dict.fromkeys((*KINDS, "streams", "events"), 0)


def scenario() -> None:
    """A slab of each kind, advice, batches copied, all given back."""
    driver = CudaDriver()
    driver.device_count()
    driver.memory_info(0)
    for asked in ("registered", "managed"):
        with SlabMaker(driver, asked=asked).make(65536, label=asked) as slab:  # type: ignore[arg-type]
            advice.prefer(driver, driver.capabilities(0), (slab.address, slab.size), "gpu")
            advice.prefetch(driver, driver.capabilities(0), (slab.address, slab.size), device(0), 0)
            copy(driver, slab)


def copy(driver: CudaDriver, slab: Slab) -> None:
    memory = DriverMemory(driver)
    copier = Copier(driver, memory)
    try:
        arrived = [copier.copy([SlabRange(slab, 0, 4096), SlabRange(slab, 8192, 4096)]) for _ in range(3)]
        assert arrived.count(None) == copier.failed <= 1
    finally:
        copier.close()
        memory.close()


def test_every_failure_at_every_turn(emulator: Emulator) -> None:
    before = {call: emulator.calls(call) for call in CALLS}
    scenario()
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
    held = regions()
    emulator.fail(call, nth, 999)
    message = outcome()
    emulator.heal()
    gc.collect()
    assert regions() == held, f"{call}:{nth}"
    assert emulator.held() == NOTHING, f"{call}:{nth}: {emulator.held()}"
    assert message is None or call in message, f"{call}:{nth}: {message}"
    return message is not None


def outcome() -> str | None:
    """None, or the message of the typed error; any other exception goes through."""
    try:
        scenario()
    except MemoryRoomError as failed:
        return str(failed)
    return None


def regions() -> int:
    """Memory that we hold, mapped or allocated."""
    return sum(isinstance(thing, Region) for thing in gc.get_objects())
