"""Stock CUDA torch, unmodified, over the emulated runtime: pool, views, staging and hints with real CUDA tensors.

What needs a kernel can't run here; everything that is allocation, copy, stream or event does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory import hints
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.budget import Budget
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.pool.pool import ManagedPool, rehome
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.memory.staging.buffers import TorchBuffers
from simpletuner_gh200.memory.staging.layout import Range
from simpletuner_gh200.memory.staging.stager import DeviceStager
from simpletuner_gh200.memory.views import cuda_view
from simpletuner_gh200.seams.features.oversubscription.optimizer import PooledOptimizer
from tests.emulator.emulation import Emulator

MIB = 1 << 20
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.fixture(scope="session")
def pool(emulator: Emulator) -> ManagedPool:
    return ManagedPool(detect.current(), limit=48 * MIB, pattern="gpu_first")


@pytest.fixture
def slab(driver: Driver) -> Iterator[Slab]:
    made = SlabMaker(driver, Budget("node 0", None), measured={}).make(MIB, label="latents")
    yield made
    made.close()


def test_torch_runs_on_the_emulated_device(driver: Driver) -> None:
    assert driver.name == "cuda"
    assert "Emulated" in torch.cuda.get_device_name(0)
    tensor = torch.arange(64.0).pin_memory().to("cuda", non_blocking=True)
    assert torch.equal(tensor.cpu(), torch.arange(64.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_view_shows_the_slabs_own_bytes(driver: Driver, slab: Slab, dtype: torch.dtype) -> None:
    view = cuda_view(slab, 256, (3, 5), dtype, driver.capabilities(0))
    assert view.is_cuda
    assert view.dtype == dtype
    assert view.data_ptr() == slab.address + 256
    slab.tensor(256, (3, 5), dtype).view(torch.uint8).fill_(1)
    assert bool((view.cpu().view(torch.uint8) == 1).all())


def test_cuda_view_outlives_the_slab(driver: Driver, emulator: Emulator) -> None:
    made = SlabMaker(driver, Budget("node 0", None), asked="registered").make(4096, label="embeds")
    registered = emulator.counter("registered")
    view = cuda_view(made, 0, (16,), torch.float32, driver.capabilities(0))
    made.tensor(0, (16,), torch.float32).fill_(3.0)
    made.close()
    del made
    gc.collect()
    assert view.cpu().sum() == 48
    assert emulator.counter("registered") == registered
    del view
    gc.collect()
    assert emulator.counter("registered") == registered - 1


def test_no_view_of_plain_memory_behind_pcie(emulator: Emulator, driver: Driver) -> None:
    from dataclasses import replace

    behind_pcie = replace(driver.capabilities(0), pageable_access=False, mode="discrete")
    with pytest.raises(FeatureUnavailable, match="can't reach that"):
        cuda_view(Slab.anonymous(64), 0, (4,), torch.float32, behind_pcie)


def test_torch_allocates_in_the_pool_and_only_inside(driver: Driver, pool: ManagedPool) -> None:
    outside = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    with pool.use():
        inside = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert pool.holds(inside)
    assert not pool.holds(outside)
    assert pool.state().held >= MIB


def test_pool_goes_beyond_hbm_and_raises_torchs_own_error_at_its_limit(
    driver: Driver, pool: ManagedPool, emulator: Emulator
) -> None:
    emulator.set_hbm(16 * MIB)
    with pool.use():
        beyond = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.holds(beyond)
    assert pool.state().held > 16 * MIB, "more than the device has"
    assert pool.state().refused > 0
    emulator.set_hbm(64 * MIB)


def test_existing_tensors_move_into_the_pool_in_place(driver: Driver, pool: ManagedPool) -> None:
    shadow = torch.arange(1000.0).to("cuda")
    parameter = torch.nn.Parameter(torch.arange(500.0).to("cuda"))
    assert rehome(pool, [shadow, parameter, torch.zeros(3)]) == 2
    assert pool.holds(shadow)
    assert pool.holds(parameter)
    assert torch.equal(shadow.cpu(), torch.arange(1000.0))
    assert rehome(pool, [shadow, parameter]) == 0


class Moments:
    """Makes its state as torch's optimizers do, at the first step with a gradient; the arithmetic needs kernels."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self.param_groups = [{"params": weights}]
        self.state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}

    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state.setdefault(weight, {"exp_avg": torch.empty_like(weight), "exp_avg_sq": torch.empty_like(weight)})


def test_optimizer_state_is_born_in_the_pool(driver: Driver, pool: ManagedPool) -> None:
    weight = torch.nn.Parameter(torch.empty(4096, device="cuda"))
    weight.grad = torch.empty(4096, device="cuda")
    optimizer = Moments([weight])
    born: list[torch.Tensor] = []
    pooled = PooledOptimizer(optimizer, pool, born.extend)
    pooled.install()
    optimizer.step()
    assert len(born) == 2
    assert all(pool.holds(tensor) for tensor in born)
    assert not pool.holds(weight)
    pooled.uninstall()


def test_statistics_on_another_thread_do_not_block_the_pool(driver: Driver, pool: ManagedPool) -> None:
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


def test_staged_batches_are_cuda_tensors_with_the_right_bytes(driver: Driver, slab: Slab, emulator: Emulator) -> None:
    for index in range(8):
        slab.tensor(index * 256, (8, 8), torch.float32).fill_(index)
    emulator.defer()
    stager = DeviceStager(driver, TorchBuffers("cuda:0"), depth=2)
    tickets = [
        stager.submit(step, [[Range(slab, (step + offset) * 256, (8, 8), torch.float32) for offset in (0, 2)]])
        for step in range(4)
    ]
    for step, ticket in enumerate(tickets):
        (batch,) = ticket.wait()
        assert batch is not None
        assert batch.is_cuda
        assert batch.shape == (2, 8, 8)
        assert [float(value) for value in batch.cpu()[:, 0, 0]] == [step, step + 2]
    stager.close()


def test_hints_tell_pool_from_caching_allocator(driver: Driver, pool: ManagedPool) -> None:
    hints.set_uvm_hint_override(True)
    with pool.use():
        placed = torch.empty(MIB, device="cuda")
    plain = torch.empty(MIB, device="cuda")
    report = hints.optimize_batch_for_gh200({"latents": placed, "prompt_embeds": plain})
    hints.set_uvm_hint_override(None)
    assert (report.helped, report.not_helped) == (1, 1)
    assert "caching allocator" in next(iter(report.reasons))


def test_kernels_are_refused_not_faked() -> None:
    with pytest.raises(RuntimeError, match="refuses this"):
        torch.empty(4, device="cuda").add_(1)
