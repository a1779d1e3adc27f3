"""The unified caches on CUDA memory: from a file of SimpleTuner's to a batch on the device, bytes and placement."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from simpletuner_gh200.cache.batch import DeviceDelivery
from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import take_in
from simpletuner_gh200.cache.hbm import HbmTier, through
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.lane import Copier, CudaLane
from simpletuner_gh200.memory.out_of_memory import on_out_of_memory
from tests.emulator.emulation import Emulator

MIB = 1 << 20


@pytest.fixture
def table(driver: Driver) -> Iterator[Table]:
    maker = SlabMaker(driver, asked="registered", measured={})
    made = Table("latents", Control.create(64, label="latents", shared=False), slabs=maker, growth=MIB)
    yield made
    made.close()


@pytest.fixture
def copier(driver: Driver) -> Iterator[Copier]:
    made = Copier(CudaLane(torch.device("cuda", 0)))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_batch_of_latents_arrives_on_the_device(
    table: Table, copier: Copier, tmp_path: Path, dtype: torch.dtype
) -> None:
    latents = [torch.full((4, 8, 8), float(number)).to(dtype) for number in range(4)]
    paths = [str(tmp_path / f"{number}.pt") for number in range(4)]
    for path, latent in zip(paths, latents, strict=True):
        torch.save(latent, path)
        assert take_in(table, path), table.statistics.fallbacks
    entries = table.find_all(paths)
    assert entries is not None
    assert {entry.segment.slab.kind for entry in entries} == {"registered"}
    delivery = DeviceDelivery(copier)
    for order in ([0, 1, 2, 3], [3, 1]):
        batch = delivery.rows([entries[at] for at in order], [entries[at].layout.single for at in order])
        assert batch is not None and batch.is_cuda
        expected = torch.stack([latents[at] for at in order])
        assert batch.cpu().view(torch.uint8).equal(expected.view(torch.uint8))
        assert batch.stride() == expected.stride()


def test_a_hit_from_registered_memory_may_be_written_to(table: Table, tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    torch.save(torch.zeros(100_000), path)
    assert take_in(table, path)
    first = table.get(path)
    first.fill_(7)
    assert not table.get(path).any()


def test_hot_embeds_stay_on_the_device_within_their_limit(table: Table, copier: Copier, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.pt") for number in range(3)]
    for number, path in enumerate(paths):
        torch.save({"prompt_embeds": torch.full((1, 77, 1024), float(number))}, path)
        assert take_in(table, path)
    size = 77 * 1024 * 4
    tier = HbmTier([table], through(copier, torch.device("cuda", 0)))
    tier.allow(2 * size + 4096)
    for _use in range(2):
        for number, path in enumerate(paths):
            copy = tier.on_device(table.get(path)["prompt_embeds"])
            assert copy.is_cuda
            assert copy.cpu().eq(float(number)).all()
    assert tier.used == 2 * size, "the third does not fit"
    assert tier.hits == 2
    tier.close()


def test_hot_embeds_make_room_when_torch_runs_out_of_memory(
    table: Table, copier: Copier, tmp_path: Path, emulator: Emulator
) -> None:
    """torch tells before it raises: whoever tries again finds the memory of the embeds free."""
    path = str(tmp_path / "embeds.pt")
    torch.save({"prompt_embeds": torch.full((1, 64, 65536), 3.0)}, path)
    assert take_in(table, path)
    tier = HbmTier([table], through(copier, torch.device("cuda", 0)))
    assert on_out_of_memory(tier.give_up)
    tier.allow(64 * MIB)
    tier.on_device(table.get(path)["prompt_embeds"])
    assert tier.used == 16 * MIB
    torch.cuda.empty_cache()
    free, _total = torch.cuda.mem_get_info()
    wanted = free + 8 * MIB
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(wanted, dtype=torch.uint8, device="cuda")
    assert tier.given_up and tier.used == 0
    again = torch.empty(wanted, dtype=torch.uint8, device="cuda")
    assert again.numel() == wanted
    tier.close()


@pytest.mark.parametrize("own_thread", [False, True], ids=["collate in the loop", "dataloader_prefetch"])
def test_what_is_staged_next_never_overwrites_what_is_being_read(
    table: Table, driver: Driver, tmp_path: Path, emulator: Emulator, own_thread: bool
) -> None:
    """Stage A, queue its reader, drop A, stage B, while the device has done nothing yet: A's reader gets A's bytes.

    The device may well do all of the side stream's work first: nothing but torch's allocator keeps B off A's memory.
    """
    paths = [str(tmp_path / f"{number}.pt") for number in range(2)]
    for number, path in enumerate(paths):
        torch.save(torch.full((4, 64, 64), float(number + 1)), path)
        assert take_in(table, path)
    entries = table.find_all(paths)
    assert entries is not None
    lane = CudaLane(torch.device("cuda", 0))
    copier = Copier(lane)
    delivery = DeviceDelivery(copier)
    emulator.defer()

    def stage(number: int) -> torch.Tensor:
        batch = delivery.rows([entries[number]], [entries[number].layout.single])
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
