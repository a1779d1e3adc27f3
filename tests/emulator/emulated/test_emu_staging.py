"""Staging on the emulated driver: bytes on the device, only after the event, and nothing kept whatever call fails."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.budget import Budget
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.memory.staging.buffers import DriverBuffers
from simpletuner_gh200.memory.staging.layout import Range
from simpletuner_gh200.memory.staging.stager import DeviceStager, Ticket
from tests.emulator.emulation import Emulator


@dataclass(frozen=True)
class Bytes:
    """Stands for torch.uint8, so that these tests start without torch."""

    itemsize: int = 1


class Addresses(DriverBuffers):
    """Hands out addresses where a CUDA torch would give tensors."""

    def take(self, size: int, stream: int):  # type: ignore[no-untyped-def]
        buffer = super().take(size, stream)
        buffer.tensor = lambda offset, shape, dtype: (buffer, buffer.address + offset)  # type: ignore[method-assign]
        return buffer


def ranges(slab: Slab, *offsets: int) -> list[Range]:
    return [Range(slab, offset, (8,), Bytes()) for offset in offsets]  # type: ignore[arg-type]


@pytest.fixture
def slab(driver: CudaDriver) -> Iterator[Slab]:
    made = SlabMaker(driver, Budget("node 0", None), measured={}).make(4096, label="latents")
    made.array[:] = [index % 251 for index in range(4096)]
    yield made
    made.close()
    gc.collect()


def staged(ticket: Ticket) -> list[bytes | None]:
    found = ticket.wait()
    return [None if item is None else ctypes.string_at(item[1], 16) for item in found]  # type: ignore[misc]


def test_ranges_land_stacked_on_the_device(driver: CudaDriver, slab: Slab, emulator: Emulator) -> None:
    stager = DeviceStager(driver, Addresses(driver), depth=2)
    ticket = stager.submit(0, [ranges(slab, 16, 100), ranges(slab, 8, 0)])
    first, second = staged(ticket)
    assert first == bytes([*range(16, 24), *range(100, 108)])
    assert second == bytes([*range(8, 16), *range(8)])
    stager.close()
    del ticket, stager


def test_the_consumers_stream_waits_for_the_copies(driver: CudaDriver, slab: Slab, emulator: Emulator) -> None:
    stager = DeviceStager(driver, Addresses(driver), depth=2)
    waits = emulator.calls("cuStreamWaitEvent")
    stager.submit(0, [ranges(slab, 0)]).wait()
    assert emulator.calls("cuStreamWaitEvent") == waits + 1
    stager.close()
    del stager


@pytest.mark.parametrize(
    "call",
    ["cuMemAlloc", "cuEventCreate", "cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamWaitEvent"],
)
def test_a_failing_call_is_one_batchs_trouble(driver: CudaDriver, slab: Slab, emulator: Emulator, call: str) -> None:
    stager = DeviceStager(driver, Addresses(driver), depth=2)
    emulator.fail(call, 1, 999)
    ticket = stager.submit("bad", [ranges(slab, 0), ranges(slab, 64)])
    found = ticket.wait()
    assert len(found) == 2
    if call != "cuEventSynchronize":
        assert None in found
        assert call in str(next(iter(ticket.errors.values())))
    emulator.heal()
    assert staged(stager.submit("good", [ranges(slab, 24, 32)])) == [bytes(range(24, 40))]
    stager.close()
    del ticket, found, stager
