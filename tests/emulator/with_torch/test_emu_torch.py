"""Stock CUDA torch, unmodified, over the emulated runtime: pool, copier and hints with real CUDA tensors.

What needs a kernel can't run here; everything that is allocation, copy, stream or event does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.lane import Copier, CudaLane
from simpletuner_gh200.memory.pool.pool import GracePool
from simpletuner_gh200.memory.slab import Bytes, Slab
from tests.emulator.emulation import Emulator

MIB = 1 << 20


@pytest.fixture
def pool(emulator: Emulator) -> GracePool:
    return GracePool("host", limit=1 << 40, why="a test")


@pytest.fixture
def slab(driver: Driver) -> Iterator[Slab]:
    made = SlabMaker(driver).make(MIB, label="latents")
    yield made
    made.close()


def test_statistics_on_another_thread_do_not_block_the_pool(driver: Driver, pool: GracePool) -> None:
    import threading

    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            torch.cuda.memory_stats()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pool.use():
        sizes = [torch.empty(4096 * (index + 1), device="cuda").numel() for index in range(50)]
    stop.set()
    watcher.join(10)
    assert not watcher.is_alive()
    assert len(sizes) == 50


def rows(slab: Slab, *numbers: int) -> list[Bytes]:
    for number in numbers:
        slab.array[number * 256 : (number + 1) * 256] = number
    return [slab.bytes_at(number * 256, 256) for number in numbers]


def test_batches_are_cuda_tensors_with_the_right_bytes(driver: Driver, slab: Slab, emulator: Emulator) -> None:
    emulator.defer()
    copier = Copier(CudaLane(torch.device("cuda", 0)))
    batches = [copier.copy(rows(slab, step, step + 2)) for step in range(4)]
    for step, batch in enumerate(batches):
        assert batch is not None
        assert batch.is_cuda
        assert batch.shape == (512,)
        assert batch.cpu().view(2, 256)[:, 0].tolist() == [step, step + 2]
    copier.close()
    assert copier.under_way == 0


def test_without_its_wait_torch_would_read_too_early(
    driver: Driver, slab: Slab, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: this is what it would see."""
    emulator.defer()
    monkeypatch.setattr(CudaLane, "wait", lambda _lane, _ticket: None)
    copier = Copier(CudaLane(torch.device("cuda", 0)))
    batch = copier.copy(rows(slab, 77))
    assert batch is not None
    assert batch.cpu().tolist() != [77] * 256
    copier.close()


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "a stream of its own"])
def test_memory_is_not_used_again_before_the_consumer_is_through(
    driver: Driver, slab: Slab, emulator: Emulator, own_stream: bool
) -> None:
    """torch is told which stream reads the batch: the next batch gets its memory only when that stream is done."""
    emulator.defer()
    copier = Copier(CudaLane(torch.device("cuda", 0)))
    consumer = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    with torch.cuda.stream(consumer):
        batch = copier.copy(rows(slab, 5))
        assert batch is not None
        back = torch.empty(256, dtype=torch.uint8, pin_memory=True)
        back.copy_(batch, non_blocking=True)
        place = batch.data_ptr()
        del batch
        following = copier.copy(rows(slab, 9))
        assert following is not None
        assert following.data_ptr() != place, "the copy back has not even begun"
        consumer.synchronize()
        assert back.tolist() == [5] * 256
        assert following.cpu().tolist() == [9] * 256
        del following
        used_again = {copier.copy(rows(slab, number)).data_ptr() for number in range(3)}  # type: ignore[union-attr]
    assert place in used_again
    copier.close()


def test_kernels_are_refused_not_faked() -> None:
    with pytest.raises(RuntimeError, match="refuses this"):
        torch.empty(4, device="cuda").add_(1)
