"""Model state on CUDA memory: what is where, the peak, the budget, ordering of the streaming step, the soft landing.

The arithmetic of a step needs kernels and is proven on the CPU; everything else is here, with stock CUDA torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.lane import CudaLane
from simpletuner_gh200.memory.pool.pool import GracePool, Mechanism
from simpletuner_gh200.model.activations.arena import DeviceRoom
from simpletuner_gh200.model.catching import CaughtOptimizer, Keeper
from simpletuner_gh200.model.placement import Placement
from simpletuner_gh200.model.streaming import StreamedOptimizer
from simpletuner_gh200.seams.features.state.feature import StateFeature
from simpletuner_gh200.seams.runtime import Launch, Runtime
from tests.emulator.emulation import Emulator
from tests.emulator.with_torch.conftest import idle_in_pools

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)
SIDE = 2048
SIZE = SIDE * SIDE * 4
"""Of one tensor: 16 MiB, above what torch cuts from shared segments."""


@pytest.fixture
def roomy(driver: Driver, emulator: Emulator) -> Iterator[Emulator]:
    emulator.set_hbm(1 << 30)
    torch.cuda.empty_cache()
    yield emulator
    torch.cuda.empty_cache()


@pytest.fixture
def pool(roomy: Emulator) -> GracePool:
    return GracePool("host", limit=1 << 40, why="a test", node=0)


def blank(*shape: int) -> torch.Tensor:
    """Zeros on the device without a kernel."""
    return torch.zeros(shape).to("cuda")


class Moments:
    """Makes its state as torch's optimizers do, at the first step with a gradient; then it only copies: no kernels."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self.param_groups = [{"params": weights}]
        self.state: dict[torch.nn.Parameter, dict[str, Any]] = {}

    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is None:
                continue
            state = self.state.setdefault(weight, {})
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.empty_like(weight.data)
                state["exp_avg_sq"] = torch.empty_like(weight.data)
            state["exp_avg"].copy_(state["exp_avg_sq"])
            state["exp_avg_sq"].copy_(weight.grad)


def parameters(count: int) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(blank(SIDE, SIDE)) for _ in range(count)]
    for number, weight in enumerate(made):
        weight.grad = torch.full((SIDE, SIDE), float(number + 1)).to("cuda")
    return made


@pytest.mark.parametrize("mechanism", ["host", "vmm"])
def test_state_is_born_in_the_pool_and_hbm_sees_one_tensor(roomy: Emulator, mechanism: Mechanism) -> None:
    pool = GracePool(mechanism, limit=1 << 40, why="a test", node=0)
    optimizer = Moments(parameters(4))
    caught = CaughtOptimizer(optimizer, Keeper(pool, Placement("cpu_first", MIB)))
    before = roomy.counter("hbm_used")
    caught.step(optimizer.step)
    assert caught.tally.tensors == 8
    assert caught.tally.bytes == 8 * SIZE
    assert caught.tally.small_tensors == 4, "counters stay where they are"
    assert roomy.counter("hbm_used") - before <= SIZE + 4 * MIB, "one tensor, and what torch rounds up"
    assert roomy.counter("grace_used") > 0
    assert pool.state().held >= 8 * SIZE
    assert type(optimizer.state) is dict
    assert all(type(values) is dict for values in optimizer.state.values())
    caught.step(optimizer.step)
    assert optimizer.state[optimizer.param_groups[0]["params"][2]]["exp_avg"].cpu().eq(3.0).all()


def test_gpu_first_keeps_its_budget_in_hbm_and_a_resume_comes_back_to_it(pool: GracePool, roomy: Emulator) -> None:
    optimizer = Loadable(parameters(3))
    caught = CaughtOptimizer(optimizer, Keeper(pool, Placement("gpu_first", MIB, budget=2 * SIZE)))
    caught.step(optimizer.step)
    assert (caught.tally.hbm_tensors, caught.tally.tensors) == (2, 4)
    caught.step(optimizer.step)
    assert (caught.tally.hbm_tensors, caught.tally.tensors) == (2, 4), "counted once, however often it is swept"
    caught.keeper.placement = Placement("gpu_first", MIB)
    loaded = {
        "state": {
            number: {name: torch.full((SIDE, SIDE), float(number)) for name in ("exp_avg", "exp_avg_sq")}
            for number in range(3)
        },
        "param_groups": [{"params": [0, 1, 2]}],
    }
    before = roomy.counter("hbm_used")
    caught.load(optimizer.load_state_dict, loaded)
    assert roomy.counter("hbm_used") - before <= SIZE + 4 * MIB, "never two of them at once"
    assert (caught.tally.hbm_tensors, caught.tally.tensors) == (0, 6)
    caught.keeper.placement = Placement("gpu_first", MIB, budget=2 * SIZE)
    assert caught.promote() == 2 * SIZE
    caught.sweep()
    assert (caught.tally.hbm_tensors, caught.tally.tensors) == (2, 4)


def test_beyond_the_limit_it_is_torchs_error_with_our_words(roomy: Emulator) -> None:
    pool = GracePool("host", limit=0, why="a test")
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"does not fit into Grace memory.*a test"):
        pool.take(torch.empty(SIDE, SIDE, device="cuda"))
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"loaded or made does not fit.*a test"), pool.use():
        torch.empty(SIDE, SIDE, device="cuda")
    torch.empty(SIDE, SIDE, device="cuda")


def streaming(pool: GracePool, count: int, **without: Any) -> tuple[Moments, StreamedOptimizer]:
    """An optimizer whose state is in the pool, and its streaming step over lanes that lack a call."""
    optimizer = Moments(parameters(count))
    caught = CaughtOptimizer(optimizer, Keeper(pool, Placement("cpu_first", MIB)))
    caught.step(optimizer.step)
    sides = CudaLane(DEVICE), CudaLane(DEVICE)
    for lane in sides:
        vars(lane).update(without)
    return optimizer, StreamedOptimizer(caught, sides, room=2 * SIZE)


@pytest.mark.parametrize("careful", [True, False])
def test_streamed_state_arrives_in_order(pool: GracePool, roomy: Emulator, careful: bool) -> None:
    """Deferred work shows a missing wait: without the lane's events a step would see what the buffer held before."""
    optimizer, streamed = streaming(pool, 5, **({} if careful else {"wait": lambda ticket: None}))
    roomy.defer()
    streamed.step(optimizer.step)
    seen = [state["exp_avg"].cpu().unique().tolist() for state in optimizer.state.values()]
    right = seen == [[float(number + 1)] for number in range(5)]
    assert right == careful, seen
    assert streamed.steps == 1
    assert streamed._caught.tally.tensors == 10, "all of it is home again"


@pytest.mark.parametrize("careful", [True, False])
def test_a_streamed_step_that_fails_leaves_state_at_home(pool: GracePool, roomy: Emulator, careful: bool) -> None:
    """Copies of what was stepped before are waited for; what was never stepped has its bytes."""
    optimizer, streamed = streaming(pool, 5, **({} if careful else {"settle": lambda: None}))
    homes = [state[name].data_ptr() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    turns: list[int] = []

    def fails_in_the_third_chunk() -> None:
        turns.append(1)
        if len(turns) == 3:
            raise ValueError("a kernel")
        optimizer.step()

    roomy.defer()
    with pytest.raises(ValueError, match="a kernel"):
        streamed.step(fails_in_the_third_chunk)
    states = list(optimizer.state.values())
    assert [state[name].data_ptr() for state in states for name in ("exp_avg", "exp_avg_sq")] == homes
    stepped = [state["exp_avg"].cpu().unique().tolist() for state in states[:2]]
    assert (stepped == [[1.0], [2.0]]) == careful, stepped
    assert [state["exp_avg_sq"].cpu().unique().tolist() for state in states] == [[1.0], [2.0], [3.0], [4.0], [5.0]]


def test_streaming_costs_two_buffers_of_hbm(pool: GracePool, roomy: Emulator) -> None:
    optimizer, streamed = streaming(pool, 6)
    torch.cuda.empty_cache()
    before = roomy.counter("hbm_used")
    streamed.step(optimizer.step)
    assert roomy.counter("hbm_used") - before == 2 * 2 * SIZE
    assert streamed.staged_bytes == 12 * SIZE


def test_when_hbm_is_full_the_reserve_helps_and_tells(roomy: Emulator) -> None:
    pool = GracePool("host", limit=1 << 40, why="a test")
    reserve = pool.open_reserve(64 * MIB)
    assert reserve.held == 64 * MIB
    assert reserve.look() == 0
    assert (pool.share().reserved, pool.share().allocated) == (64 * MIB, 0), "idle, and none of HBM's"
    torch.cuda.empty_cache()
    roomy.set_hbm(roomy.counter("hbm_used"))
    landed = [torch.empty(SIDE, SIDE, device="cuda") for _ in range(4)]
    assert all(pool.holds(tensor) for tensor in landed)
    assert reserve.look() == pool.share().allocated == 4 * SIZE
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(SIDE, SIDE, device="cuda")
    del landed
    assert reserve.look() == 0
    assert (reserve.most, reserve.times) == (4 * SIZE, 1)
    roomy.set_hbm(1 << 30)


def test_an_idle_reserve_is_no_room_for_activations(driver: Driver, roomy: Emulator) -> None:
    torch.cuda.empty_cache()
    taken = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    pool = GracePool("host", limit=1 << 40, why="a test")
    room = DeviceRoom(driver, torch.device("cuda", 0), 0, list, idle_in_pools)
    before = room.bytes()
    pool.open_reserve(64 * MIB)
    with pool.use():
        torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.share().idle >= 88 * MIB
    assert room.bytes() == before <= (1 << 30) - 256 * MIB
    del taken


def test_a_reserve_that_does_not_fit_is_refused_at_the_start(roomy: Emulator) -> None:
    with pytest.raises(FeatureUnavailable, match="oom_reserve_gb"):
        GracePool("host", limit=MIB, why="a test").open_reserve(64 * MIB)


@pytest.mark.parametrize("machine", ["gh200", "crashing-vmm"])
def test_a_run_from_probe_to_summary(roomy: Emulator, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """The feature as SimpleTuner drives it: mechanism by trial, budget from what the device has left, soft landing."""
    monkeypatch.setenv("GH200_EMU_PERSONALITY", machine)
    monkeypatch.setenv("GH200_EMU_HBM", str(1 << 30))
    roomy.become(machine)
    roomy.set_hbm(4 << 30)
    weights = parameters(3)
    accelerator = SimpleNamespace(
        device=torch.device("cuda", 0), distributed_type="NO", num_processes=1, backward=lambda loss: loss
    )
    config = SimpleNamespace(optimizer="torch-adamw", use_ema=False)
    run = SimpleNamespace(accelerator=accelerator, config=config, optimizer=Loadable(weights), ema_model=None)
    feature = StateFeature()
    feature.runtime = Runtime(Launch())
    wish = {"use_uvm": True, "oom_reserve_gb": 0.0625}
    feature.runtime.settings = resolve({"gh200_optimizations": wish}, {})
    feature.runtime.trainer = run
    with detect.using(CudaDriver()):  # one that has not asked how much HBM there is
        feature.start(run)
        feature.hooks_ready(run)
        feature.before_train(run)
        headroom = 2 << 30
        roomy.set_hbm(headroom + torch.cuda.max_memory_allocated() + (600 << 20))
        run.accelerator.backward(None)
        run.optimizer.step()
    found = feature.summary()
    assert found["mechanism"] == "host"
    assert found["gb_per_s"] == {"read": pytest.approx(340, rel=0.01), "write": pytest.approx(306, rel=0.01)}
    assert found["tensors"] * SIZE == found["bytes"]
    kept = found["of"]["optimizer"]["hbm_bytes"]
    assert kept + found["bytes"] == 6 * SIZE
    assert kept <= found["hbm_budget"]["bytes"]
    assert "at the peak of a step" in found["hbm_budget"]["why"]
    assert found["oom_reserve"]["held"] == 64 * MIB
    assert feature.telemetry()["oom_reserve"] == {"used": 0, "most": 0, "times": 0}
    feature.after_train(run)
    feature.close()
    roomy.set_hbm(1 << 30)


class Loadable(Moments):
    """As torch's own: what has the type and the device of its parameter is taken as it is."""

    def load_state_dict(self, loaded: Any) -> None:
        weights = self.param_groups[0]["params"]
        self.state = {
            weight: {name: value.to(weight.device) for name, value in loaded["state"][number].items()}
            for number, weight in enumerate(weights)
        }
