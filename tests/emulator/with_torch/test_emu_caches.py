"""The unified caches on CUDA memory: from a file of SimpleTuner's to a batch on the device, bytes and placement."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from simpletuner_gh200.held.batch import DeviceDelivery
from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.fill import Filler
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.lane import Copier, CudaLane
from tests.emulator.emulation import Emulator


@pytest.fixture
def cache() -> Iterator[HeldCache]:
    made = HeldCache.alone("latents")
    yield made
    made.close()


def take_in(driver: Driver, cache: HeldCache, paths: list[str]) -> None:
    """Into memory that the device knows of."""
    Filler(cache, maker=SlabMaker(driver, requested="registered")).fill(paths)
    assert len(cache.shelf) == len(paths), cache.statistics.fallbacks


@pytest.fixture
def copier(driver: Driver) -> Iterator[Copier]:
    made = Copier(CudaLane(torch.device("cuda", 0)))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_batch_of_latents_arrives_on_the_device(
    cache: HeldCache, driver: Driver, copier: Copier, tmp_path: Path, dtype: torch.dtype
) -> None:
    latents = [torch.full((4, 8, 8), float(number)).to(dtype) for number in range(4)]
    paths = [str(tmp_path / f"{number}.pt") for number in range(4)]
    for path, latent in zip(paths, latents, strict=True):
        torch.save(latent, path)
    take_in(driver, cache, paths)
    entries = cache.find_all(paths)
    assert entries is not None
    assert {entry.segment.slab.kind for entry in entries} == {"registered"}
    delivery = DeviceDelivery(copier)
    for order in ([0, 1, 2, 3], [3, 1]):
        batch = delivery([entries[at] for at in order], [entries[at].layout.single for at in order])
        assert batch is not None and batch.is_cuda
        expected = torch.stack([latents[at] for at in order])
        assert batch.cpu().view(torch.uint8).equal(expected.view(torch.uint8))
        assert batch.stride() == expected.stride()


def test_a_hit_from_registered_memory_may_be_written_to(cache: HeldCache, driver: Driver, tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    torch.save(torch.zeros(100_000), path)
    take_in(driver, cache, [path])
    first = cache.get(path)
    first.fill_(7)
    assert not cache.get(path).any()


@pytest.mark.parametrize("own_thread", [False, True], ids=["collate in the loop", "dataloader_prefetch"])
def test_what_is_staged_next_never_overwrites_what_is_being_read(
    cache: HeldCache, driver: Driver, tmp_path: Path, emulator: Emulator, own_thread: bool
) -> None:
    """Stage A, queue its reader, drop A, stage B, while the device has done nothing yet: A's reader gets A's bytes.

    The device may well do all of the side stream's work first: nothing but torch's allocator keeps B off A's memory.
    """
    paths = [str(tmp_path / f"{number}.pt") for number in range(2)]
    for number, path in enumerate(paths):
        torch.save(torch.full((4, 64, 64), float(number + 1)), path)
    take_in(driver, cache, paths)
    entries = cache.find_all(paths)
    assert entries is not None
    lane = CudaLane(torch.device("cuda", 0))
    copier = Copier(lane)
    delivery = DeviceDelivery(copier)
    emulator.defer()

    def stage(number: int) -> torch.Tensor:
        batch = delivery([entries[number]], [entries[number].layout.single])
        assert batch is not None
        return batch

    with ThreadPoolExecutor(1) as collating:
        staged = (lambda number: collating.submit(stage, number).result()) if own_thread else stage
        back = [torch.empty(1, 4, 64, 64, pin_memory=True) for _ in paths]
        for number, buffer in enumerate(back):
            batch = staged(number)
            buffer.copy_(batch, non_blocking=True)
            del batch
    lane.settle()
    torch.cuda.synchronize()
    copier.close()
    assert [sorted(set(buffer.flatten().tolist())) for buffer in back] == [[1.0], [2.0]]
