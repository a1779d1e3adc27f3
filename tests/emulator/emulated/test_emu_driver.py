"""The CUDA driver of ours over NVIDIA's bindings: capabilities, memory, advice, order, contexts, errors."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

import pytest

from simpletuner_gh200.errors import DriverError, MemoryRoomError
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.driver.interface import HOST, device
from tests.emulator.emulation import Emulator

MODES = {
    "gh200": "numa",
    "cdmm": "cdmm",
    "gb10": "single pool",
    "pcie": "discrete",
    "hmm": "discrete",
    "legacy": "discrete",
}


def test_each_capability_is_a_fact_of_its_own(personality: str, driver: CudaDriver) -> None:
    caps = driver.capabilities(0)
    assert caps.mode == MODES[personality]
    assert caps.managed
    assert caps.concurrent_managed == (personality != "legacy")
    assert caps.pageable_access == (personality in {"gh200", "cdmm", "gb10", "hmm"})
    assert caps.host_page_tables == (caps.pageable_access and personality != "hmm")
    assert caps.direct_managed_from_host == (personality in {"gh200", "cdmm"})
    assert caps.integrated == (personality == "gb10")
    assert caps.device_node == (1 if personality == "gh200" else None)
    assert caps.host_node == 0
    assert caps.device_total == 64 << 20
    assert caps.page_size == os.sysconf("SC_PAGESIZE")


def test_capabilities_are_asked_once(emulator: Emulator, driver: CudaDriver) -> None:
    driver.capabilities(0)
    asked = emulator.calls("cuDeviceGetAttribute")
    assert driver.capabilities(0) is driver.capabilities(0)
    assert emulator.calls("cuDeviceGetAttribute") == asked


def test_managed_memory_is_usable_by_the_cpu_and_known_as_managed(emulator: Emulator, driver: CudaDriver) -> None:
    address = driver.alloc_managed(10_000, 0)
    ctypes.memset(address, 7, 10_000)
    assert driver.pointer_kind(address) == "managed"
    driver.free(address, 0)
    with pytest.raises(DriverError, match=r"cuMemFree failed with CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.free(address, 0)


def test_kinds_of_pointers(driver: CudaDriver) -> None:
    block = ctypes.create_string_buffer(8192)
    plain = ctypes.addressof(block)
    assert driver.pointer_kind(plain) == "unknown"
    driver.register_host(plain, 8192, 0)
    assert driver.pointer_kind(plain) == "host"
    driver.unregister_host(plain, 0)
    on_device = driver.alloc_device(4096, 0)
    assert driver.pointer_kind(on_device) == "device"
    driver.free(on_device, 0)


def test_pages_are_moved_to_where_they_are_asked_for(emulator: Emulator, driver: CudaDriver) -> None:
    address = driver.alloc_managed(1 << 20, 0)
    driver.prefer((address, 4096), HOST, device(0))
    driver.prefetch((address + 8192, 4096), device(0), 0)
    assert [emulator.residency(address + offset) for offset in (0, 4096, 8192, 12288)] == [-1, -1, 0, -1]
    driver.prefetch((address + 8192, 4096), HOST, 0)
    assert emulator.residency(address + 8192) == -1
    driver.free(address, 0)


def test_a_copy_is_timed_by_the_devices_clock_and_over_when_it_returns(emulator: Emulator, driver: CudaDriver) -> None:
    emulator.defer()
    source, back = ctypes.create_string_buffer(b"latents!" * 512), ctypes.create_string_buffer(4096)
    target = driver.alloc_device(4096, 0)
    assert driver.copy_seconds((target, ctypes.addressof(source), 4096), 0) > 0
    assert ctypes.string_at(target, 8) == b"latents!"
    assert driver.copy_seconds((ctypes.addressof(back), target, 4096), 0) > 0
    assert back.raw == source.raw[:4096]
    driver.free(target, 0)


def test_the_callers_context_is_left_as_it_was(emulator: Emulator, driver: CudaDriver) -> None:
    depth = emulator.context_depth()
    driver.free(driver.alloc_device(4096, 0), 0)
    emulator.fail("cuMemAlloc", 1, 2)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        driver.alloc_device(4096, 0)
    assert emulator.context_depth() == depth


def test_every_thread_gets_the_primary_context(driver: CudaDriver) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                driver.free(driver.alloc_managed(4096, 0), 0)
        except BaseException as failed:  # noqa: BLE001 - handed to the main thread
            failures.append(failed)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_forked_child_is_refused_before_it_touches_the_driver(driver: CudaDriver) -> None:
    driver.device_count()
    pid = os.fork()
    if pid == 0:
        try:
            driver.alloc_managed(4096, 0)
        except MemoryRoomError as refused:
            os._exit(0 if "forked" in str(refused) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_error_names_call_code_and_remedy(emulator: Emulator, driver: CudaDriver) -> None:
    emulator.set_hbm(8192)
    with pytest.raises(DriverError) as raised:
        driver.alloc_device(1 << 20, 0)
    assert (raised.value.call, raised.value.code, raised.value.name) == ("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    assert "hbm_limit_gb" in str(raised.value)


def test_advice_on_wrong_memory_is_invalid(emulator: Emulator, driver: CudaDriver) -> None:
    address = driver.alloc_device(4096, 0)
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        driver.prefer((address, 4096), HOST)
    driver.free(address, 0)
    emulator.become("legacy")
    managed = driver.alloc_managed(4096, 0)
    with pytest.raises(DriverError, match="INVALID_DEVICE"):
        driver.prefetch((managed, 4096), device(0), 0)
    driver.free(managed, 0)


def test_a_rank_makes_no_context_on_devices_it_was_not_given(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GH200_EMU_DEVICES", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    driver = detect.open_driver()
    assert driver.name == "cuda"
    assert driver.home == 2
    slab = SlabMaker(driver).make(8192, label="latents")
    assert driver.pointer_kind(slab.address) == "host"
    assert isinstance(driver, CudaDriver)
    assert list(driver._contexts) == [2]
    slab.close()
    gc.collect()


@pytest.mark.parametrize(("rank", "count", "home"), [("0", 4, 0), ("3", 4, 3), ("3", 1, 0), ("", 2, 0), ("5", 4, 1)])
def test_home_device(rank: str, count: int, home: int) -> None:
    assert detect.home_device({"LOCAL_RANK": rank} if rank else {}, count) == home
