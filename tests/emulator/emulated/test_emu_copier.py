"""The copier on the emulated driver: bytes on the device, only after the event, nothing kept whatever fails."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator

import pytest

from simpletuner_gh200.diagnostics.selftest.checks.copies import DriverMemory
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.copier import Copier, SlabRange
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.mapping import Region, map_anonymous
from simpletuner_gh200.memory.slab import Slab
from tests.emulator.emulation import Emulator

WAITING = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")


def ranges(slab: Slab, *offsets: int) -> list[SlabRange]:
    return [SlabRange(slab, offset, 8) for offset in offsets]


def filled(driver: CudaDriver) -> Slab:
    made = SlabMaker(driver, measured={}).make(4096, label="latents")
    made.array[:] = [index % 251 for index in range(4096)]
    return made


@pytest.fixture
def slab(driver: CudaDriver) -> Iterator[Slab]:
    made = filled(driver)
    yield made
    made.close()
    gc.collect()


@pytest.fixture
def copier(driver: CudaDriver, emulator: Emulator) -> Iterator[Copier[Region]]:
    memory = DriverMemory(driver)
    made = Copier(driver, memory)
    yield made
    emulator.heal()
    made.close()
    memory.close()
    assert made.under_way == 0


def read_by_the_consumer(driver: CudaDriver, buffer: Region | None) -> bytes:
    """As a kernel behind ``copy`` would read it: on the consumer's stream, waiting for nothing else."""
    assert buffer is not None
    back = map_anonymous(buffer.size)
    driver.copy([(back.address, buffer.address, buffer.size)], 0, 0)
    driver.synchronize_stream(0, 0)
    return ctypes.string_at(back.address, buffer.size)


def test_ranges_land_stacked_on_the_device(driver: CudaDriver, slab: Slab, copier: Copier[Region]) -> None:
    first, second = copier.copy(ranges(slab, 16, 100)), copier.copy(ranges(slab, 8, 0))
    assert read_by_the_consumer(driver, first) == bytes([*range(16, 24), *range(100, 108)])
    assert read_by_the_consumer(driver, second) == bytes([*range(8, 16), *range(8)])


def test_the_consumers_stream_waits_for_the_copies(
    driver: CudaDriver, slab: Slab, copier: Copier[Region], emulator: Emulator
) -> None:
    emulator.defer()
    waited = [emulator.calls(call) for call in WAITING]
    buffers = [copier.copy(ranges(slab, offset)) for offset in (0, 8, 16)]
    assert [emulator.calls(call) for call in WAITING] == waited, "the CPU waits for none of them"
    for offset, buffer in zip((0, 8, 16), buffers, strict=True):
        assert read_by_the_consumer(driver, buffer) == bytes(range(offset, offset + 8))


def test_without_its_wait_the_consumer_would_read_too_early(
    driver: CudaDriver, slab: Slab, copier: Copier[Region], emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: this is what it would see."""
    emulator.defer()
    monkeypatch.setattr(driver, "wait_event", lambda stream, event, ordinal: None)
    assert read_by_the_consumer(driver, copier.copy(ranges(slab, 8))) != bytes(range(8, 16))


def test_sources_go_when_the_event_is_done_and_not_before(
    driver: CudaDriver, slab: Slab, copier: Copier[Region], emulator: Emulator
) -> None:
    emulator.defer()
    short = filled(driver)
    gone = weakref.ref(short.region)
    buffer = copier.copy(ranges(short, 40))
    short.close()
    del short
    copier.copy(ranges(slab, 0))
    gc.collect()
    assert gone() is not None, "its event is not done"
    assert emulator.counter("registered") == 2
    assert read_by_the_consumer(driver, buffer) == bytes(range(40, 48))
    copier.copy(ranges(slab, 0))
    gc.collect()
    assert gone() is None
    assert emulator.counter("registered") == 1


@pytest.mark.parametrize(
    "call", ["cuMemAlloc", "cuEventCreate", "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery"]
)
def test_a_failing_call_is_one_batchs_trouble(
    driver: CudaDriver,
    slab: Slab,
    copier: Copier[Region],
    emulator: Emulator,
    call: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert copier.copy(ranges(slab, 0)) is not None
    emulator.fail(call, 1, 999)
    assert copier.copy(ranges(slab, 0, 64)) is None
    assert copier.failed == 1
    assert call in caplog.text
    emulator.heal()
    assert read_by_the_consumer(driver, copier.copy(ranges(slab, 24, 32))) == bytes(range(24, 40))


def test_copies_queued_before_one_that_failed_keep_their_sources(
    driver: CudaDriver, slab: Slab, copier: Copier[Region], emulator: Emulator
) -> None:
    emulator.defer()
    short = filled(driver)
    gone = weakref.ref(short.region)
    emulator.fail("cuMemcpyAsync", 2, 999)
    assert copier.copy(ranges(short, 0, 64)) is None
    short.close()
    del short
    gc.collect()
    assert gone() is not None
    copier.close()
    gc.collect()
    assert gone() is None
