"""The C allocator of the pool, driven as torch drives it: mechanisms, limit, a failure at any call, threads, fork."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.driver.interface import Location
from simpletuner_gh200.memory.pool import probe
from simpletuner_gh200.memory.pool.pool import DRIVER, HOST_IS_SHORT, LIMIT, MECHANISMS, Allocator, Mechanism
from tests.emulator.emulation import Emulator

MIB = 1 << 20
KIND = {"host": "host", "vmm": "device"}
COUNTED = {"host": "pinned", "vmm": "mapped"}
CALLS = {
    "host": ("cuMemHostAlloc",),
    "vmm": (
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ),
}
"""What each mechanism needs to succeed."""


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_what_is_where(driver: CudaDriver, emulator: Emulator, mechanism: Mechanism) -> None:
    allocator = Allocator(mechanism, limit=8 * MIB, node=0)
    address = allocator.alloc(3 * MIB, 0)
    assert address is not None
    assert driver.pointer_kind(address) == KIND[mechanism]
    assert driver.physical_location(address) == (Location("node", 0) if mechanism == "vmm" else None)
    assert allocator.home(address) == allocator.home(address + 3 * MIB - 1) == mechanism
    assert allocator.home(address - 1) is None
    assert emulator.held()[COUNTED[mechanism]] == 1
    assert emulator.counter("hbm_used") == 0, "nothing of it in HBM"
    assert allocator.state().held == (4 * MIB if mechanism == "vmm" else 3 * MIB), "padded to whole units"
    allocator.free(address, 3 * MIB, 0)
    assert allocator.home(address) is None
    assert allocator.state().held == 0


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_device_copies_to_it_and_back(driver: CudaDriver, emulator: Emulator, mechanism: Mechanism) -> None:
    allocator = Allocator(mechanism, limit=8 * MIB, node=0)
    address = allocator.alloc(2 * MIB, 0)
    assert address is not None
    written, back = ctypes.create_string_buffer(b"grace" * 100), ctypes.create_string_buffer(500)
    driver.copy_seconds((address + 4096, ctypes.addressof(written), 500), 0)
    driver.copy_seconds((ctypes.addressof(back), address + 4096, 500), 0)
    assert back.raw == written.raw[:500]
    allocator.free(address, 2 * MIB, 0)


def test_memory_that_was_mapped_for_nobody_is_no_memory(driver: CudaDriver, emulator: Emulator) -> None:
    """The test above can fail: without the access the pool asks for, a copy is an illegal address."""
    library = ctypes.CDLL(os.environ["GH200_EMU_LIBRARY"])
    allocator = Allocator("vmm", limit=8 * MIB, node=0)
    address = allocator.alloc(2 * MIB, 0)
    assert address is not None
    driver.memory_info(0)
    assert library.emu_forbid(ctypes.c_size_t(address)) == 0
    with pytest.raises(DriverError, match="700"):
        driver.copy_seconds((address, address + MIB, 100), 0)
    allocator.free(address, 2 * MIB, 0)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_up_to_the_limit_then_null_with_the_reason(emulator: Emulator, mechanism: Mechanism) -> None:
    allocator = Allocator(mechanism, limit=10 * MIB, node=0)
    held = [allocator.alloc(2 * MIB, 0) for _ in range(5)]
    assert all(held)
    refused = allocator.state().refused
    assert allocator.alloc(1, 0) is None
    assert allocator.state().refused == refused + 1
    assert allocator.state().last_refusal == LIMIT
    for address in held:
        allocator.free(address, 2 * MIB, 0)  # type: ignore[arg-type]
    again = allocator.alloc(10 * MIB, 0)
    assert again is not None, "what was given back can be had again"
    allocator.free(again, 10 * MIB, 0)


@pytest.mark.parametrize("mechanism", ["host", "vmm"])
def test_when_grace_is_full_it_is_null_and_not_a_kill(emulator: Emulator, mechanism: Mechanism) -> None:
    emulator.set_grace(6 * MIB)
    allocator = Allocator(mechanism, limit=100 * MIB, node=0)
    held = [allocator.alloc(2 * MIB, 0) for _ in range(4)]
    assert [address is not None for address in held] == [True, True, True, False]
    assert (allocator.state().last_refusal, allocator.state().last_error) == (DRIVER, 2)
    for address in held[:3]:
        allocator.free(address, 2 * MIB, 0)  # type: ignore[arg-type]
    assert emulator.counter("grace_used") == 0


def test_the_last_of_the_hosts_memory_is_not_taken(emulator: Emulator) -> None:
    allocator = Allocator("host", limit=100 * MIB, floor=1 << 60)
    asked = emulator.calls("cuMemHostAlloc")
    assert allocator.alloc(MIB, 0) is None
    assert allocator.state().last_refusal == HOST_IS_SHORT
    assert emulator.calls("cuMemHostAlloc") == asked, "the driver was not even asked"


@pytest.mark.parametrize(("mechanism", "call"), [(name, call) for name in MECHANISMS for call in CALLS[name]])
def test_a_failure_at_any_call_leaves_nothing(emulator: Emulator, mechanism: Mechanism, call: str) -> None:
    allocator = Allocator(mechanism, limit=8 * MIB, node=0)
    before = emulator.held()
    for nth in (1, 2) if call == "cuMemGetAllocationGranularity" else (1,):
        emulator.fail(call, nth, 2)
        assert allocator.alloc(2 * MIB, 0) is None
        assert (allocator.state().last_refusal, allocator.state().last_error) == (DRIVER, 2)
        assert emulator.held() == before
        assert allocator.state().held == 0
        emulator.heal()
    address = allocator.alloc(2 * MIB, 0)
    assert address is not None, "one failure is not the end"
    allocator.free(address, 2 * MIB, 0)


def test_threads_share_one_limit(emulator: Emulator) -> None:
    allocator = Allocator("vmm", limit=32 * MIB, node=0)
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
    # The limit is asked before a block is padded to two megabytes.
    assert len(held) == 16
    assert len(found) == 32
    for address in held:
        allocator.free(address, MIB, 0)
    assert allocator.state().held == 0


def test_a_forked_child_gets_null_and_frees_nothing(emulator: Emulator) -> None:
    allocator = Allocator("host", limit=8 * MIB)
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


# -- the probe ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "taken", "said"),
    [
        ("gh200", "host", "no faster"),
        ("node-refused", "host", "refused with error 1"),
        ("slow-vmm", "host", "less than a tenth"),
        ("fast-vmm", "vmm", "no faster"),
        ("crashing-vmm", "host", "SIGSEGV"),
    ],
)
def test_the_probe_takes_what_works_and_says_why(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, machine: str, taken: str, said: str
) -> None:
    """In children, as in a run: these get the machine from the environment."""
    emulator.become(machine)
    emulator.set_hbm(1 << 30)
    monkeypatch.setenv("GH200_EMU_PERSONALITY", machine)
    monkeypatch.setenv("GH200_EMU_HBM", str(1 << 30))
    trials = probe.try_out(CudaDriver().capabilities(0))
    choice = probe.choose(trials)
    assert choice is not None
    assert choice.taken.mechanism == taken
    assert said in choice.why
    best = 340e9 if taken == "host" else 330e9
    assert choice.taken.read == pytest.approx(best, rel=0.01)
    assert choice.taken.write == pytest.approx(0.9 * best, rel=0.01)


def test_a_trial_gives_everything_back(driver: CudaDriver, emulator: Emulator) -> None:
    for mechanism in MECHANISMS:
        assert probe.measure(driver, mechanism, 0, 0, size=4 * MIB).error is None
    emulator.fail("cuMemAlloc", 1, 2)
    with pytest.raises(DriverError):
        probe.measure(driver, "host", 0, 0, size=4 * MIB)
    assert not any(emulator.held().values())
