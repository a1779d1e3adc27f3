"""Hints where there is a device: ours and system memory can be placed, the caching allocator's can't."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simpletuner_gh200.memory import hints
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
def slab() -> Slab:
    made = Slab.anonymous(1 << 20)
    made.array[:] = 0
    return made


@pytest.mark.usefixtures("kernel")
def test_batch_is_placed_by_key(slab: Slab, emulator: Emulator) -> None:
    batch = {
        "latents": floats(slab, 0, 4096),
        "text": {"prompt_embeds": floats(slab, 16384, 4096)},
        "tiny_prompt_embeds": floats(slab, 32768, 4),
        "noise": floats(slab, 65536, 4096),
    }
    report = hints.optimize_batch_for_gh200(batch)
    assert (report.helped, report.not_helped, report.untouched) == (2, 1, 1)
    assert "no whole page" in next(iter(report.reasons))
    assert [emulator.residency(slab.address + offset) for offset in (0, 16384, 65536)] == [-1, 0, -1]


@pytest.mark.parametrize("call", ["cuMemAdvise", "cuPointerGetAttribute", "cuCtxPushCurrent"])
def test_a_failing_driver_gives_a_reason_not_an_exception(slab: Slab, emulator: Emulator, call: str) -> None:
    emulator.fail(call, 1, 1 if call != "cuPointerGetAttribute" else 999)
    result = hints.prefer_gpu_residency(floats(slab, 0, 4096))
    assert not result
    assert call in result.reason
