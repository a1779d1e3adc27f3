"""Every call that takes or asks is failed at each of its turns: a typed error or an honest result, nothing kept."""

from __future__ import annotations

import gc

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory import advice
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.mapping import Region, map_anonymous
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
    "cuMemHostRegister",
    "cuPointerGetAttribute",
    "cuMemAdvise",
    "cuMemPrefetchAsync",
    "cuStreamCreate",
    "cuEventCreate",
    "cuEventRecord",
    "cuMemcpyAsync",
)
"""All but those that give something back, and the context calls, which those need too: failing these is a leak."""

NOTHING = dict.fromkeys((*KINDS, "streams", "events"), 0)


def scenario() -> None:
    """A registered slab, advice on it and on plain memory, a copy to the device and back, all given back."""
    driver = CudaDriver()
    driver.device_count()
    driver.memory_info(0)
    caps = driver.capabilities(0)
    plain = map_anonymous(65536)
    plain.array()[:] = 1
    advice.prefetch(driver, caps, (plain.address, plain.size), 0)
    with SlabMaker(driver, requested="registered").make(65536, label="latents") as slab:
        advice.prefer(driver, caps, (slab.address, slab.size), "gpu")
        target = driver.alloc_device(4096, 0)
        try:
            assert driver.copy_seconds((target, slab.address, 4096), 0) > 0
        finally:
            driver.free(target, 0)


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
    assert tried > 30
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
