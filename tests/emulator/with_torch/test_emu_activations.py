"""Activations in Grace on stock CUDA torch: real hooks, real autograd, copies only, since kernels can't run here.

A chain of functions each saves a tensor of its own; the backward pass copies what it is given to the host, on its own
stream. Work is deferred, and the side streams run as late as they may or as early: a correct order gives the right
bytes in both, and each single wait that is left out shows in one of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.lane import CudaLane, Move, StillUnderWay, Ticket, spot_of
from simpletuner_gh200.model.activations.arena import Arena, DeviceRoom, Room
from simpletuner_gh200.model.activations.offload import Offloader, measure_link
from simpletuner_gh200.seams.features.activations.feature import ActivationsFeature
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.upstream.features import ON
from tests.emulator.emulation import Emulator
from tests.emulator.with_torch.conftest import idle_in_pools

DEVICE = torch.device("cuda", 0)
SIZE = 16 * 1024
CHAIN = 6
MIB = 1 << 20

Wait = Literal["source written", "source copied", "buffer free", "arrived"]
WAITS: tuple[Wait, Wait, Wait, Wait] = ("source written", "source copied", "buffer free", "arrived")
"""Before and behind a copy out, before and behind one back."""


class Watched(CudaLane):
    """``early``: its stream runs as soon as it may. ``without``: such waits are left out. ``trouble`` may fail."""

    def __init__(self, waits: tuple[Wait, Wait], *, early: bool, without: Wait | None, trouble: Trouble) -> None:
        super().__init__(DEVICE)
        self._before, self._behind = (wait == without for wait in waits)
        self._early, self._trouble = early, trouble

    def copy(self, moves: Iterable[Move], *after: Ticket) -> Ticket:
        self._trouble.call()
        ticket = super().copy(moves, *(() if self._before else after))
        if self._early:
            self.settle()
        return ticket

    def wait(self, ticket: Ticket, brought: torch.Tensor | None = None) -> None:
        if not self._behind:
            super().wait(ticket, brought)

    def done(self, ticket: Ticket) -> bool:
        self._trouble.call()
        return super().done(ticket)


class Trouble:
    """So many calls go well, then one fails."""

    def __init__(self, fail: int = 0) -> None:
        self.calls, self._fail = 0, fail

    def call(self) -> None:
        self.calls += 1
        if self.calls == self._fail:
            raise RuntimeError("a call failed")


class Through(torch.autograd.Function):
    """Passes on its first argument and saves the second, which backward copies to the host."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor, seen: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        ctx.seen(kept)
        return gradient.clone(), None, None


class Chain:
    """A forward pass that saves ``CHAIN`` tensors, each full of its own number, and what backward was given."""

    def __init__(self) -> None:
        self.sources = [torch.full((SIZE,), number + 1, dtype=torch.uint8).pin_memory() for number in range(CHAIN)]
        self.backs: list[torch.Tensor] = []
        self.leaf = torch.empty(256, device=DEVICE, requires_grad=True)

    def forward(self, offset: int) -> torch.Tensor:
        x: torch.Tensor = self.leaf
        for number in range(CHAIN):
            kept = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
            kept.copy_(self.sources[(number + offset) % CHAIN], non_blocking=True)
            x = Through.apply(x, kept, self._seen)
        return x

    def _seen(self, kept: torch.Tensor) -> None:
        back = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
        back.copy_(kept, non_blocking=True)
        self.backs.append(back)

    def results(self) -> list[int | None]:
        """Of each back copy its number, None where it is a mixture."""
        torch.cuda.current_stream().synchronize()
        found = [int(back[0]) if bool((back == back[0]).all()) else None for back in self.backs]
        self.backs.clear()
        return found


def expected(offset: int) -> list[int]:
    return [(number + offset) % CHAIN + 1 for number in reversed(range(CHAIN))]


@pytest.fixture
def chain(driver: Driver, emulator: Emulator) -> Iterator[Chain]:
    emulator.set_hbm(64 * MIB)
    torch.cuda.empty_cache()
    made = Chain()
    torch.cuda.synchronize()
    yield made
    emulator.heal()
    torch.cuda.synchronize()


def engine_on(
    driver: Driver,
    *,
    early: bool = False,
    without: Wait | None = None,
    trouble: Trouble | None = None,
    limit: int = MIB,
) -> Offloader:
    options: dict[str, Any] = {"early": early, "without": without, "trouble": trouble or Trouble()}
    sides = Watched(WAITS[:2], **options), Watched(WAITS[2:], **options)
    maker = SlabMaker(driver)
    arena = Arena(lambda size: maker.make(size, label="activations"), limit)
    return Offloader(sides, arena, minimum=1, room=Room(), in_flight=2 * SIZE)


def steps(engine: Offloader, chain: Chain, count: int = 3) -> list[bool]:
    """Is each step's backward pass given what its forward pass saved?"""
    right = []
    for step in range(count):
        with engine.step("a", lambda: [chain.leaf], []):
            out = chain.forward(step)
        out.backward(torch.empty_like(out))
        chain.leaf.grad = None
        del out
        right.append(chain.results() == expected(step))
    return right


@pytest.mark.parametrize("early", [False, True], ids=["side streams late", "side streams early"])
def test_backward_gets_what_forward_saved(driver: Driver, emulator: Emulator, chain: Chain, early: bool) -> None:
    engine = engine_on(driver, early=early)
    emulator.defer()
    assert steps(engine, chain) == [True] * 3
    assert engine.moved == 3 * CHAIN * SIZE
    assert engine.failed == 0
    assert 0 < engine.brought <= engine.moved, "those whose copy was not even done were still there"
    slabs = engine.arena.slabs
    assert steps(engine, chain) == [True] * 3
    assert engine.arena.slabs == slabs, "no memory is taken after the first step of a shape"
    engine.close()


@pytest.mark.parametrize("without", WAITS)
def test_every_single_wait_that_is_left_out_shows(
    driver: Driver, emulator: Emulator, chain: Chain, without: Wait
) -> None:
    shown = []
    for early in (False, True):
        engine = engine_on(driver, early=early, without=without)
        emulator.defer()
        shown += steps(engine, chain)
        emulator.heal()
        torch.cuda.synchronize()
        engine.close()
    assert not all(shown), f"nobody would have missed the wait for {without!r}"


def test_sources_leave_the_device_in_bounds(driver: Driver, emulator: Emulator, chain: Chain) -> None:
    """With all of it saved the forward pass would hold ``CHAIN`` tensors; two copies are under way at most."""
    engine = engine_on(driver)
    torch.cuda.synchronize()
    emulator.defer()
    before = torch.cuda.memory_allocated()
    with engine.step("a", lambda: [chain.leaf], []):
        out = chain.forward(0)
        held = torch.cuda.memory_allocated() - before
    assert held < 4 * SIZE < CHAIN * SIZE
    out.backward(torch.empty_like(out))
    assert chain.results() == expected(0)
    del out
    engine.close()


def test_any_call_may_fail_and_the_run_goes_on(driver: Driver, emulator: Emulator, chain: Chain) -> None:
    counting = Trouble()
    engine = engine_on(driver, trouble=counting)
    emulator.defer()
    assert all(steps(engine, chain, 2))
    engine.close()
    for failing in range(1, counting.calls + 1):
        emulator.heal()
        torch.cuda.synchronize()
        engine = engine_on(driver, trouble=Trouble(failing))
        emulator.defer()
        assert all(steps(engine, chain, 2)), f"call {failing} of {counting.calls}"
        engine.finish()
        assert engine.arena.in_use == 0, f"call {failing} of {counting.calls}"
        engine.close()
        del engine
        gc.collect(0)


@pytest.mark.parametrize("call", ["cuStreamWaitEvent", "cuMemcpyAsync", "cuEventRecord"])
@pytest.mark.parametrize("seen", [True, False], ids=["its end is seen", "its end is not seen"])
def test_a_copy_that_fails_is_over_or_said_to_be_under_way(
    driver: Driver, emulator: Emulator, call: str, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = CudaLane(DEVICE)
    source, target = torch.full((2, SIZE), 7, dtype=torch.uint8).pin_memory(), torch.empty(2, SIZE, dtype=torch.uint8)
    near, far = torch.empty(2, SIZE, dtype=torch.uint8, device=DEVICE), target.pin_memory()
    emulator.defer()
    moves = [(spot_of(near[row]), spot_of(source[row]), SIZE) for row in range(2)]
    if not seen:
        monkeypatch.setattr(lane, "settle", _fails)
    here = lane.here()
    emulator.fail(call, 1, 999)
    with pytest.raises(RuntimeError) as failed:
        lane.copy(moves, here)
    emulator.heal()
    assert isinstance(failed.value, StillUnderWay) != seen
    assert (lane._abandoned == []) == seen, "both sides are kept for ever"
    monkeypatch.undo()
    ticket = lane.copy(moves, here)
    emulator.fail("cuStreamWaitEvent", 1, 999)
    lane.wait(ticket)
    emulator.heal()
    far.copy_(near)
    assert far.eq(7).all()
    lane.settle()
    assert lane.done(ticket)


def _fails() -> None:
    raise RuntimeError("no answer")


def test_the_link_is_measured_each_way(driver: Driver, emulator: Emulator) -> None:
    emulator.set_hbm(512 * MIB)
    engine = engine_on(driver, limit=256 * MIB)
    rates = measure_link(driver, engine.arena, 0)
    assert rates is not None
    assert rates.d2h > 0
    assert rates.h2d > 0
    assert engine.arena.in_use == 0
    engine.close()


def test_room_in_hbm_is_what_a_step_leaves(driver: Driver, emulator: Emulator, chain: Chain) -> None:
    emulator.set_hbm(64 * MIB)
    room = DeviceRoom(driver, DEVICE, 4 * MIB, lambda: [chain.leaf], idle_in_pools)
    room.begin()
    needed = torch.empty(10 * MIB, dtype=torch.uint8, device=DEVICE)
    del needed
    room.end()
    free, total = driver.memory_info(0)
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - idle_in_pools()
    assert total == 64 * MIB
    assert room.bytes() == free + cached - 10 * MIB - 4 * MIB
    weights = torch.empty(20 * MIB, dtype=torch.uint8, device=DEVICE)
    assert room.bytes() <= free + cached - 30 * MIB - 4 * MIB
    del weights


def test_state_that_is_born_between_two_steps_is_no_need_of_a_step(
    driver: Driver, emulator: Emulator, chain: Chain
) -> None:
    room = DeviceRoom(driver, DEVICE, 4 * MIB, lambda: [chain.leaf], idle_in_pools)
    engine = engine_on(driver)
    engine._room = room
    steps(engine, chain, 1)
    before = room.bytes()
    state = torch.empty(20 * MIB, dtype=torch.uint8, device=DEVICE)
    validation = torch.empty(10 * MIB, dtype=torch.uint8, device=DEVICE)
    del validation
    engine.finish()
    assert before - 22 * MIB <= room.bytes() <= before - 20 * MIB, "taken once, not counted as a temporary besides"
    del state
    engine.close()


# -- the feature, as a run has it -----------------------------------------------------------------------------


def feature_on(chain: Chain, **block: Any) -> tuple[Runtime, ActivationsFeature, Any]:
    """Started and trained with by a trainer whose model is the chain."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=DEVICE, distributed_type="NO", sync_gradients=True),
        config=SimpleNamespace(gradient_checkpointing=False),
        model=SimpleNamespace(),
        optimizer=SimpleNamespace(param_groups=[{"params": [chain.leaf]}]),
    )
    runtime, feature = Runtime(Launch()), ActivationsFeature()
    runtime.grace.idle = idle_in_pools  # type: ignore[method-assign]
    feature.runtime = runtime
    runtime.features = (feature,)
    for seam in runtime.seams.values():
        seam.status = ON
    options = {"activation_min_tensor_kb": 0, "activation_hbm_reserve_gb": 8 / 1024, **block}
    runtime.configure(resolve({"gh200_optimizations": options}, {}))
    runtime.call("start", trainer)
    runtime.call("before_train", trainer)
    return runtime, feature, trainer


def trained(runtime: Runtime, trainer: Any, chain: Chain, step: int) -> bool:
    """Is a step's backward pass given what its forward pass saved?"""
    (predicting,) = runtime.moment("predicting")
    with predicting(trainer, {"latents": torch.empty(2, 4, 8, 8)}):
        out = chain.forward(step)
    out.backward(torch.empty_like(out))
    chain.leaf.grad = None
    return chain.results() == expected(step)


@pytest.mark.parametrize("asked", ["grace", "auto"])
def test_a_run_moves_what_hbm_has_no_room_for_and_nothing_else(
    driver: Driver, emulator: Emulator, chain: Chain, asked: str
) -> None:
    emulator.set_hbm(512 * MIB)
    runtime, feature, trainer = feature_on(chain, activations=asked, activation_limit_gb=0.25)
    told = feature.summary()
    assert told["link"]["d2h"] > 0 and told["link"]["h2d"] > 0, "measured before the first step"
    assert all(trained(runtime, trainer, chain, step) for step in range(3))
    first = CHAIN * SIZE
    assert feature.summary()["moved"] == first, "the first step is measured, the others have room enough"
    (shape,) = feature.summary()["shapes"]
    assert (shape["kept_bytes"], shape["offloaded_bytes"]) == (first, 0)
    torch.cuda.empty_cache()
    filled = torch.empty(driver.memory_info(0)[0] - 2 * MIB, dtype=torch.uint8, device=DEVICE)
    assert all(trained(runtime, trainer, chain, step) for step in range(3)), "with HBM nearly full"
    found = feature.summary()
    assert found["moved"] == 4 * first, "no room but the reserve: all of it leaves"
    assert (found["failed"], found["stayed_for_want_of_room"]) == (0, 0)
    del filled
    runtime.unwind("after_train", trainer)
    runtime.close()


def test_a_link_that_can_not_be_measured_is_still_a_link_to_grace(
    driver: Driver, emulator: Emulator, chain: Chain
) -> None:
    """HBM has no 64 MiB left to measure with."""
    runtime, feature, trainer = feature_on(chain, activations="grace", activation_limit_gb=0.25)
    assert all(trained(runtime, trainer, chain, step) for step in range(2))
    assert feature.summary()["link"] is None
    assert feature.summary()["chosen"] == "in Grace, as asked"
    runtime.unwind("after_train", trainer)
    runtime.close()
