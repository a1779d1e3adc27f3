"""Weights in slots and gradients in Grace on stock CUDA torch: order of copies and compute, failures, peak, leaks.

Each block saves its weight and copies it to the host, in forward and in backward: kernels can't run here. Work is
deferred, and the side stream runs as late as it may or as early: each single wait left out shows in one of them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.lane import CudaLane, Lane
from simpletuner_gh200.memory.pool.pool import GracePool
from simpletuner_gh200.model.blocks import find_blocks
from simpletuner_gh200.model.gradients import PooledGradients
from simpletuner_gh200.model.slots import WeightStream
from simpletuner_gh200.model.tensors import move_to
from simpletuner_gh200.seams.features import weights
from simpletuner_gh200.seams.features.loading import LoadingFeature
from simpletuner_gh200.seams.features.weights import WeightsFeature
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.upstream.features import ON
from tests.emulator.emulation import Emulator
from tests.emulator.with_torch.test_emu_activations import DEVICE, MIB, Trouble, Watched

DEPTH = 6
SHAPE = 3072, 1024
SIZE = 12 * MIB
"""Of a weight: above what torch cuts from shared segments."""


class Reads(torch.autograd.Function):
    """Passes on its first argument; what the weight holds goes to the host, now and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.seen = seen
        _show(weight, seen)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        _show(weight, ctx.seen)
        return gradient.clone(), torch.empty_like(weight).copy_(weight) if ctx.needs_input_grad[1] else None, None


def _show(weight: torch.Tensor, seen: list[torch.Tensor]) -> None:
    back = torch.empty(SHAPE, pin_memory=True)
    back.copy_(weight.detach(), non_blocking=True)
    seen.append(back)


class Block(nn.Module):
    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.weight = nn.Parameter(torch.empty(SHAPE, device=DEVICE), requires_grad=False)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reads.apply(x, self.weight, self.seen)


class Stack(nn.Module):
    """Each block's weight is full of its own number, and changes with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.blocks = nn.ModuleList(Block(self.seen) for _ in range(DEPTH))
        self.leaf = torch.empty(256, device=DEVICE, requires_grad=True)
        self.numbers = [torch.full(SHAPE, float(at)).pin_memory() for at in range(DEPTH + 4)]

    def change(self, step: int) -> None:
        """As an optimizer does: at home, on the computing stream."""
        for at, block in enumerate(self.blocks):
            block.weight.data.copy_(self.numbers[at + step], non_blocking=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def results(self) -> list[float | None]:
        """Of each reading its number, None where it is a mixture."""
        torch.cuda.current_stream().synchronize()
        found = [float(back[0, 0]) if bool((back == back[0, 0]).all()) else None for back in self.seen]
        self.seen.clear()
        return found


@pytest.fixture
def stack(driver: Driver, emulator: Emulator) -> Iterator[Stack]:
    emulator.set_hbm(1 << 30)
    torch.cuda.empty_cache()
    pool = GracePool("host", limit=1 << 40, why="a test", node=0)
    made = Stack()
    for block in made.blocks:
        move_to(block.weight, pool.take(block.weight.data))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield made
    emulator.heal()
    torch.cuda.synchronize()
    emulator.set_hbm(1 << 30)


def stream_on(stack: Stack, lane: Lane | None = None, **options: Any) -> WeightStream:
    stream = WeightStream(find_blocks([stack]), lane or CudaLane(DEVICE), **options)
    stream.install([stack])
    return stream


def steps(stream: WeightStream, stack: Stack, count: int = 3) -> list[bool]:
    """Do forward and backward read what each weight was at that step?"""
    right = []
    for step in range(count):
        stack.change(step)
        with stream.step():
            out = stack(stack.leaf)
        out.backward(torch.empty_like(out))
        stream.go_home()
        stack.leaf.grad = None
        numbers = [float(at + step) for at in range(DEPTH)]
        right.append(stack.results() == [*numbers, *reversed(numbers)])
    return right


@pytest.mark.parametrize("early", [False, True], ids=["side stream late", "side stream early"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_block_reads_its_own_weights(stack: Stack, emulator: Emulator, early: bool, slots: int) -> None:
    """One slot is one too few to bring anything ahead, and still right."""
    lane = Watched(("before", "arrived"), early=early, without=None, trouble=Trouble())  # type: ignore[arg-type]
    stream = stream_on(stack, lane, slots=slots)
    before = emulator.counter("hbm_used")
    emulator.defer()
    assert steps(stream, stack) == [True] * 3
    assert stream.slot_bytes == slots * SIZE
    assert emulator.counter("hbm_used") - before <= slots * SIZE + 2 * MIB, "what was planned"
    late, moved = stream.late, stream.streamed
    assert steps(stream, stack) == [True] * 3
    if slots > 1:
        assert stream.late == late
        assert stream.streamed - moved == 3 * (2 * DEPTH - slots) * SIZE
    assert (stream.failed, stream.kept) == (0, 0)
    stream.remove()


@pytest.mark.parametrize("without", ["before", "arrived"])
def test_every_wait_that_is_left_out_shows(stack: Stack, emulator: Emulator, without: str) -> None:
    """Before a copy: the weight is written at home, and the slot was read. Behind it: it has arrived."""
    shown = []
    for early in (False, True):
        lane = Watched(("before", "arrived"), early=early, without=without, trouble=Trouble())  # type: ignore[arg-type]
        stream = stream_on(stack, lane)
        emulator.defer()
        shown += steps(stream, stack)
        emulator.heal()
        torch.cuda.synchronize()
        stream.remove()
    assert not all(shown)


def test_any_call_may_fail_and_nothing_leaks(stack: Stack, emulator: Emulator) -> None:
    """Of the lane's, then of the driver's: a block that can't be brought is read where it lives."""
    counting = Trouble()
    stream = stream_on(stack, Watched(("a", "b"), early=False, without=None, trouble=counting))  # type: ignore[arg-type]
    assert all(steps(stream, stack, 2))
    stream.remove()
    for failing in range(1, counting.calls + 1):
        trouble = Trouble(failing)
        stream = stream_on(stack, Watched(("a", "b"), early=False, without=None, trouble=trouble))  # type: ignore[arg-type]
        emulator.defer()
        assert all(steps(stream, stack, 2)), f"call {failing} of {counting.calls}"
        assert stream.failed == 1
        stream.remove()
        emulator.heal()
        torch.cuda.synchronize()
    for call in ("cuStreamWaitEvent", "cuMemcpyAsync", "cuEventRecord"):
        for nth in range(1, 8, 2):
            stream = stream_on(stack)
            lane = stream._lane
            stack.change(0)
            with stream.step():
                stack.blocks[0](stack.leaf)
                emulator.fail(call, nth, 999)
                for block in stream.blocks[1:4]:
                    stream._fetch(block, beside=stream.blocks[0])
                emulator.heal()
            lane.settle()
            stack.seen.clear()
            stream.remove()
            assert all(steps(stream_on(stack), stack, 1)), f"after {call} {nth}"
            for block in stack.blocks:
                block._forward_pre_hooks.clear()
    del stream, lane
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    stream = stream_on(stack)
    assert all(steps(stream, stack, 2))
    stream.remove()
    del stream
    gc.collect()
    assert torch.cuda.memory_allocated() == left


def test_when_hbm_has_no_room_for_a_slot_weights_are_read_where_they_live(stack: Stack, emulator: Emulator) -> None:
    torch.cuda.empty_cache()
    stream = stream_on(stack)
    stack.change(0)
    emulator.set_hbm(emulator.counter("hbm_used") + 2 * MIB)
    filled: list[torch.Tensor] = []
    with contextlib.suppress(torch.OutOfMemoryError):  # a reserve of another test's may help for a while
        while True:
            filled.append(torch.empty(SHAPE, device=DEVICE))
    with torch.no_grad(), stream.step():
        stack(stack.leaf)
    assert stack.results() == [float(at) for at in range(DEPTH)]
    assert stream.failed > 0
    assert stream.slot_bytes == 0
    del filled
    stream.remove()


def test_gradients_move_as_they_come(stack: Stack, emulator: Emulator) -> None:
    """HBM holds a few of them; each arrives with its bytes."""
    pool = GracePool("host", limit=1 << 40, why="a test", node=0)
    gradients = PooledGradients(pool, CudaLane(DEVICE))
    stack.requires_grad_(True)
    gradients.install(block.weight for block in stack.blocks)
    stack.change(0)
    out = stack(stack.leaf)
    emulator.defer()
    out.backward(torch.empty_like(out))
    gradients.settle()
    found = [block.weight.grad for block in stack.blocks]
    assert all(pool.holds(grad) for grad in found)
    assert [grad.cpu().unique().tolist() for grad in found] == [[float(at)] for at in range(DEPTH)]
    assert gradients.count() == (DEPTH, DEPTH * SIZE)
    stack.results()
    del out
    gradients.give_back()
    assert not any(pool.holds(block.weight.grad) for block in stack.blocks)
    assert stack.blocks[3].weight.grad.cpu().eq(3.0).all()


@pytest.fixture
def asked_by_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to Grace is tried in a process of its own, which meets the same machine."""
    monkeypatch.setenv("GH200_EMU_PERSONALITY", "gh200")
    monkeypatch.setenv("GH200_EMU_HBM", str(1 << 30))


def run_of(model: nn.Module, **block: Any) -> tuple[Runtime, WeightsFeature]:
    """A run that trains nothing, and its feature."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            device=DEVICE, distributed_type="NO", num_processes=1, backward=lambda loss: loss.backward(loss.detach())
        ),
        config=SimpleNamespace(optimizer="adamw_bf16"),
        model=SimpleNamespace(model=model),
        optimizer=SimpleNamespace(param_groups=[{"params": [getattr(model, "leaf", torch.empty(1))]}], state={}),
    )
    runtime, feature = Runtime(Launch()), WeightsFeature()
    runtime.features = (LoadingFeature(), feature)
    for one in runtime.features:
        one.runtime = runtime
    for seam in runtime.seams.values():
        seam.status = ON
    runtime.trainer = trainer
    runtime.configure(resolve({"gh200_optimizations": block}, {}))
    return runtime, feature


def all_reserves(emulator: Emulator) -> list[torch.Tensor]:
    """What earlier tests of ``oom_reserve_gb`` left to torch, which takes it where HBM refuses: in use, and held."""
    emulator.set_hbm(emulator.counter("hbm_used"))
    taken: list[torch.Tensor] = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(SIZE // 4, device=DEVICE))
    return taken


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
def test_a_model_larger_than_hbm_is_loaded(
    driver: Driver, emulator: Emulator, asked_by_a_child: None, tmp_path: Path, ours: bool
) -> None:
    """From mapped files to the pool, by SimpleTuner's own moves; HBM holds one block and what is in none."""
    save_file({f"{at}.weight": torch.full(SHAPE, float(at)) for at in range(DEPTH)}, tmp_path / "model.safetensors")
    model = nn.Sequential(
        nn.ModuleList(nn.ModuleDict({"inside": nn.Linear(*reversed(SHAPE), bias=False)}) for _ in range(DEPTH))
    )
    for at, weight in enumerate(load_file(tmp_path / "model.safetensors").values()):
        model[0][at]["inside"].weight.data = weight
    emulator.set_hbm(4 << 30)
    runtime, feature = run_of(model, weights="grace" if ours else "hbm")
    gc.collect()
    torch.cuda.empty_cache()
    with detect.using(CudaDriver()):
        runtime.call("start", runtime.trainer)
        _taken = all_reserves(emulator)
        emulator.set_hbm(emulator.counter("hbm_used") + 2 * SIZE + 2 * MIB)
        if not ours:
            with pytest.raises(torch.OutOfMemoryError):
                model.to(DEVICE)
            return
        nn.ModuleList([model]).to(DEVICE)
        model.to(DEVICE, dtype=torch.float32)
        for moment in ("hooks_ready", "before_train"):
            runtime.call(moment, runtime.trainer)
    pool = runtime.grace.pool
    assert all(pool.holds(weight) for weight in model.parameters())
    assert [weight.detach().cpu().unique().item() for weight in model.parameters()] == [
        float(at) for at in range(DEPTH)
    ]
    assert feature.summary()["bytes"] == DEPTH * SIZE
    runtime.unwind("after_train", runtime.trainer)
    runtime.close()


@pytest.mark.parametrize("room", [0, 3])
def test_a_run_keeps_the_last_blocks_that_hbm_has_room_for(
    stack: Stack, emulator: Emulator, asked_by_a_child: None, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """The feature as SimpleTuner drives it: all leave, the first step shows what is left, the last come back."""
    emulator.set_hbm(4 << 30)
    measured = weights.room_left

    def with_room(runtime: Runtime) -> Any:
        """HBM is as large as a step needs, a headroom, and so many blocks."""
        emulator.set_hbm((4 << 30) - measured(runtime).size + room * SIZE)
        return measured(runtime)

    monkeypatch.setattr(weights, "room_left", with_room)
    runtime, feature = run_of(stack, weights="auto")
    trainer = runtime.trainer
    with detect.using(CudaDriver()):  # one that has not asked how much HBM there is
        for moment in ("start", "hooks_ready", "before_train"):
            runtime.call(moment, trainer)
    stack.change(0)

    def step() -> list[float | None]:
        (predicting,) = runtime.moment("predicting")
        with predicting(trainer, {}):
            out = stack(stack.leaf)
        trainer.accelerator.backward(out)
        stack.leaf.grad = None
        return stack.results()

    torch.cuda.reset_peak_memory_stats()
    first = step()
    numbers = [float(at) for at in range(DEPTH)]
    assert first == step() == [*numbers, *reversed(numbers)]
    found = feature.summary()
    assert found["hbm_blocks"] == room
    assert (found["blocks"], found["bytes"]) == (DEPTH - room, (DEPTH - room) * SIZE)
    assert "at the peak of a step" in found["hbm_budget"]
    runtime.unwind("after_train", trainer)
    runtime.close()
    assert all(block.weight.is_cuda for block in stack.blocks)
