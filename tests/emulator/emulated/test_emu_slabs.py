"""Slabs on a device: kinds by personality, advice that is read back, and nothing left behind whatever fails."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import weakref

import pytest

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory import advice
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.slab import Slab
from tests.emulator.emulation import Emulator

PAGE = os.sysconf("SC_PAGESIZE")


def test_auto_registers_on_every_personality_and_says_why(
    personality: str, driver: CudaDriver, emulator: Emulator
) -> None:
    maker = SlabMaker(driver)
    slab = maker.make(1 << 20, label="latents", shared=True)
    assert slab.kind == "registered"
    assert maker.choice.reason
    assert emulator.counter("registered") == 1
    assert driver.pointer_kind(slab.address) == "host"
    view, memory = slab.bytes_at(0, 10), weakref.ref(slab.region)
    slab.close()
    gc.collect()
    assert emulator.counter("registered") == 1, "a live view keeps the registration"
    del view, slab
    gc.collect()
    assert emulator.counter("registered") == 0
    assert memory() is None


def test_managed_is_refused_with_the_reason(driver: CudaDriver) -> None:
    with pytest.raises(FeatureUnavailable, match="move back and forth"):
        SlabMaker(driver, requested="managed")


def test_auto_survives_a_refused_registration(
    driver: CudaDriver, emulator: Emulator, caplog: pytest.LogCaptureFixture
) -> None:
    emulator.fail("cuMemHostRegister", 1, 304)
    maker = SlabMaker(driver)
    slab = maker.make(1 << 20, label="latents")
    assert slab.kind == "host"
    assert "stays plain host memory" in caplog.text
    slab.close()
    gc.collect()


@pytest.mark.usefixtures("kernel")
def test_advice_covers_whole_pages_inside_only(driver: CudaDriver, emulator: Emulator) -> None:
    slab, caps = Slab.anonymous(4 * PAGE), driver.capabilities(0)
    slab.array[:] = 1
    outcome = advice.prefetch(driver, caps, (slab.address + 10, 3 * PAGE), 0)
    assert outcome
    assert [emulator.residency(slab.address + page * PAGE) for page in range(4)] == [-1, 0, 0, -1]
    assert "no whole page" in advice.prefer(driver, caps, (slab.address + 10, PAGE), "gpu").reason


def test_managed_memory_is_its_owners(driver: CudaDriver) -> None:
    address = driver.alloc_managed(PAGE, 0)
    assert "its owner advises it" in advice.prefer(driver, driver.capabilities(0), (address, PAGE), "gpu").reason
    driver.free(address, 0)


@pytest.mark.usefixtures("kernel")
def test_system_memory_follows_the_machine(personality: str, driver: CudaDriver) -> None:
    slab = Slab.anonymous(8 * PAGE)
    slab.array[:] = 1
    span = (slab.address, slab.size)
    outcome = advice.prefetch(driver, driver.capabilities(0), span, 0)
    expected = {
        "gh200": "in device memory, as the kernel tells",
        "gb10": "one physical pool",
        "cdmm": "(CDMM) the driver keeps that on the CPU",
        "pcie": "doesn't use the host's page tables",
        "hmm": "doesn't use the host's page tables",
        "legacy": "doesn't use the host's page tables",
    }
    assert expected[personality] in outcome.reason
    assert bool(outcome) == (personality == "gh200")


@pytest.mark.usefixtures("kernel")
def test_what_cannot_be_read_back_is_not_claimed(driver: CudaDriver) -> None:
    slab = Slab.anonymous(8 * PAGE)
    slab.array[:] = 1
    span, caps = (slab.address, slab.size), driver.capabilities(0)
    assert "can't be queried about system memory" in advice.prefer(driver, caps, span, "gpu").reason
    resident = advice.prefer(driver, caps, span, "cpu")
    assert resident and resident.reason.startswith("resident in host memory"), "that is all the kernel can tell"
    assert "can't be queried" in resident.reason
    assert advice.prefetch(driver, caps, span, 0)
    late = advice.prefer(driver, caps, span, "cpu")
    assert not late
    assert "pages on node 1, not in host memory" in late.reason


def test_the_real_kernel_is_not_fooled(driver: CudaDriver) -> None:
    slab = Slab.anonymous(8 * PAGE)
    untouched = advice.prefer(driver, driver.capabilities(0), (slab.address, slab.size), "cpu")
    assert "no pages there yet" in untouched.reason
    slab.array[:] = 1
    outcome = advice.prefetch(driver, driver.capabilities(0), (slab.address, slab.size), 0)
    assert not outcome, "the emulated driver moved nothing real"
    assert "the kernel has its pages on node" in outcome.reason


def test_cached_allocator_memory_is_explained(driver: CudaDriver) -> None:
    address = driver.alloc_device(2 * PAGE, 0)
    outcome = advice.prefer(driver, driver.capabilities(0), (address, 2 * PAGE), "cpu")
    assert "caching allocator" in outcome.reason
    driver.free(address, 0)


def test_child_drops_slabs_without_touching_the_driver(driver: CudaDriver) -> None:
    maker = SlabMaker(driver, requested="registered")
    slab = maker.make(1 << 20, label="latents")
    slab.array[:4] = 9
    pid = os.fork()
    if pid == 0:
        said: list[logging.LogRecord] = []
        logging.getLogger("simpletuner_gh200").addFilter(lambda record: bool(said.append(record)))
        right = int(slab.array[0]) == 9
        slab.close()
        del slab
        gc.collect()
        os._exit(0 if right and not said else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert driver.pointer_kind(slab.address) == "host"
    slab.close()
    del slab
    gc.collect()


def test_memory_that_cuda_keeps_stays_mapped(
    driver: CudaDriver, emulator: Emulator, caplog: pytest.LogCaptureFixture
) -> None:
    slab = SlabMaker(driver, requested="registered").make(1 << 20, label="latents")
    address = slab.address
    emulator.fail("cuMemHostUnregister", 1, 999)
    slab.close()
    gc.collect()
    assert "is kept" in caplog.text
    assert ctypes.string_at(address, 1) == b"\0", "still mapped"
    emulator.heal()
    driver.unregister_host(address, 0)
