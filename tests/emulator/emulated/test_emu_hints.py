"""Hints where there is a device: ours and system memory can be placed, the caching allocator's can't."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from simpletuner_gh200.memory import hints
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.slab import Slab
from tests.emulator.emulation import Emulator

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _on(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The emulated driver has no CUDA runtime above it, so torch must not try to find one.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hints.set_uvm_hint_override(True)
    with detect.using(driver):
        yield
    hints.set_uvm_hint_override(None)


def floats(slab: Slab, offset: int, count: int) -> torch.Tensor:
    return torch.from_numpy(slab.bytes_at(offset, 4 * count)).view(torch.float32)


@pytest.fixture
def managed(driver: CudaDriver) -> Iterator[Slab]:
    made = SlabMaker(driver, asked="managed").make(1 << 20, label="embeds")
    yield made
    made.close()
    gc.collect()


def test_on_a_managed_slab_they_work(managed: Slab, emulator: Emulator) -> None:
    tensor = floats(managed, 0, 1 << 16)
    assert hints.prefer_cpu_residency(tensor)
    assert hints.prefer_gpu_residency(tensor)
    result = hints.prefetch_to_device(tensor)
    assert result == True  # noqa: E712 - equal to a plain True is the promise
    assert result.reason == "prefetched to device 0"
    assert emulator.residency(managed.address) == 0


@pytest.mark.usefixtures("kernel")
def test_system_memory_where_page_tables_are_shared(personality: str) -> None:
    slab = Slab.anonymous(1 << 16)
    tensor = floats(slab, 0, 1 << 14).zero_()
    assert bool(hints.prefer_cpu_residency(tensor)) == (personality in {"gh200", "cdmm"})
    assert bool(hints.prefetch_to_device(tensor)) == (personality == "gh200")


def test_batch_is_placed_by_key(managed: Slab, emulator: Emulator) -> None:
    batch = {
        "latents": floats(managed, 0, 4096),
        "text": {"prompt_embeds": floats(managed, 16384, 4096)},
        "tiny_prompt_embeds": floats(managed, 32768, 4),
        "noise": floats(managed, 65536, 4096),
    }
    report = hints.optimize_batch_for_gh200(batch)
    assert (report.helped, report.not_helped, report.untouched) == (2, 1, 1)
    assert "no whole page" in next(iter(report.reasons))
    assert emulator.residency(managed.address) == -1
    assert emulator.residency(managed.address + 16384) == 0
    assert emulator.residency(managed.address + 65536) == -1


def test_a_lying_driver_is_not_believed(managed: Slab, emulator: Emulator) -> None:
    emulator.lie()
    result = hints.prefetch_to_device(floats(managed, 0, 4096))
    assert not result
    assert "accepted it but" in result.reason


@pytest.mark.parametrize("call", ["cuMemAdvise", "cuMemRangeGetAttribute", "cuPointerGetAttribute", "cuCtxPushCurrent"])
def test_a_failing_driver_gives_a_reason_not_an_exception(managed: Slab, emulator: Emulator, call: str) -> None:
    emulator.fail(call, 1, 1 if call != "cuPointerGetAttribute" else 999)
    result = hints.prefer_gpu_residency(floats(managed, 0, 4096))
    assert not result
    assert call in result.reason
