"""Weights in slots: the same bits with slots poisoned on release, in any order, and whatever fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from simpletuner_gh200.memory.lane import Lane, Move, StillUnderWay, lanes
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.model.activations.arena import Arena, Room
from simpletuner_gh200.model.activations.offload import Offloader
from simpletuner_gh200.model.activations.saved_tensors import let_go
from simpletuner_gh200.model.blocks import find_blocks
from simpletuner_gh200.model.placement import staying
from simpletuner_gh200.model.slots import WeightStream
from simpletuner_gh200.model.tensors import like
from simpletuner_gh200.seams.features.weights import watched
from simpletuner_gh200.seams.patch import Patch, Patches

CPU = torch.device("cpu")
WIDTH = 12


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.out = nn.ModuleList((nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)))
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.out[1](self.out[0](torch.nn.functional.gelu(self.up(x)) @ self.down.weight.t()))
        return x + self.conv(inner.reshape(-1, 3, 2, 2)).reshape(x.shape) * self.scale


class Model(nn.Module):
    """A stack and a list inside a list, as a transformer and a UNet have them; embedder and head are in no block."""

    def __init__(self, depth: int = 4, recompute: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(depth))
        self.outer = nn.ModuleList(nn.ModuleDict({"layers": nn.ModuleList((Mixer(), Mixer()))}) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        inner = [layer for outer in self.outer for layer in outer["layers"]]
        for block in (*self.blocks, *inner):
            x = block(x) if self.recompute is None else self.recompute(block, x)
        return self.head(x)


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 5 * WIDTH).reshape(5, WIDTH)


def poison(memory: torch.Tensor) -> None:
    memory.fill_(0xFF)


def trained(model: Model, around: Callable[[], AbstractContextManager[Any]] = nullcontext, rows: int = 5) -> Any:
    """Gradients of two micro-batches."""
    model.zero_grad(set_to_none=True)
    for part in (inputs()[:rows], inputs()[:rows] * 2):
        with around():
            out = model(part.to(next(model.parameters()).dtype))
        out.float().square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def stream_on(model: nn.Module, **options: Any) -> WeightStream:
    stream = WeightStream(find_blocks([model]), options.pop("lane", lanes(CPU)[1]), released=poison, **options)
    stream.install([model])
    return stream


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return bool(left) and left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


RECOMPUTED = {
    "plain": None,
    "checkpointed": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}
CASES = list(itertools.product(RECOMPUTED, ("full", "frozen"), ("fp32", "bf16", "autocast"), (1, 2, 3)))


@pytest.mark.parametrize(("recompute", "kind", "precision", "slots"), CASES)
def test_gradients_are_the_same_to_the_bit(recompute: str, kind: str, precision: str, slots: int) -> None:
    model = Model(recompute=RECOMPUTED[recompute])
    if kind == "frozen":
        model.blocks.requires_grad_(False)
        model.blocks[1].scale.requires_grad_(True)
    if precision == "bf16":
        model.to(torch.bfloat16)
    cast = partial(torch.autocast, "cpu", torch.bfloat16) if precision == "autocast" else nullcontext
    expected = trained(model, cast)
    homes = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    values = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    stream = stream_on(model, slots=slots)

    @contextmanager
    def around() -> Iterator[None]:
        with stream.step(), cast():
            yield

    for _ in range(3):
        assert same(trained(model, around), expected)
    stream.go_home()
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == homes
    assert all(weight.equal(values[name]) for name, weight in model.named_parameters())
    assert stream.streamed > 0
    assert stream.failed == 0
    largest = max(block.size for block in stream.blocks)
    assert stream.slot_bytes <= slots * largest


def test_after_the_first_step_every_block_comes_ahead_and_once() -> None:
    model = Model()
    stream = stream_on(model)
    trained(model, stream.step)
    late, before = stream.late, stream.streamed
    assert late > 0
    trained(model, stream.step)
    assert stream.late == late, "all of them were there"
    count, size = len(stream.blocks), stream.blocks[0].size
    assert stream.streamed - before == 2 * (2 * count - 2) * size, "backward begins with the two that are there"
    assert stream.kept == 0


def test_activations_that_move_leave_weights_to_their_slots() -> None:
    model = Model()
    expected = trained(model)
    stream = stream_on(model)
    engine = Offloader(
        lanes(CPU), Arena(Slab.anonymous, 1 << 26), minimum=1, room=Room(), recognise=lambda: stream.recognise
    )

    @contextmanager
    def around() -> Iterator[None]:
        with stream.step(), engine.step("a", model.parameters, []):
            yield

    for _ in range(3):
        assert same(trained(model, around), expected)
        stream.go_home()
    assert engine.moved > 0
    assert stream.kept == 0


def test_without_gradients_everything_is_home_after_the_forward_pass() -> None:
    model = Model()
    with torch.inference_mode():
        expected = model(inputs())
    homes = [weight.data_ptr() for weight in model.parameters()]
    stream = stream_on(model)
    for way in (torch.no_grad, torch.inference_mode):
        with way():
            assert model(inputs()).equal(expected)
        assert [weight.data_ptr() for weight in model.parameters()] == homes
    assert same(trained(model, stream.step), trained(Model()))
    stream.remove()
    before = stream.streamed
    model(inputs())
    assert stream.streamed == before


def test_a_part_that_runs_without_its_block_reads_its_weights_where_they_live() -> None:
    """Checkpointing may be inside a block, and then runs parts of it again in backward."""

    class Inside(Mixer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(checkpoint(self.up, x, use_reentrant=False)[:, :WIDTH])

    model, plain = Model(), Model()
    for one in (model, plain):
        for at in range(len(one.blocks)):
            inside = Inside()
            inside.load_state_dict(one.blocks[at].state_dict())
            one.blocks[at] = inside
    stream = stream_on(model)
    for _ in range(2):
        assert same(trained(model, stream.step), trained(plain))


def test_what_is_in_no_block_tied_or_no_plain_tensor_stays() -> None:
    model = Model(depth=3)
    model.blocks[0].up.weight = model.head.weight = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))
    model.blocks[1].up.bias = nn.Parameter(torch.zeros(4 * WIDTH)[: 2 * WIDTH])
    blocks = find_blocks([model, model], smallest=4 * WIDTH * 2)
    names = [block.name for block in blocks]
    assert names == ["blocks.0", "blocks.1", "blocks.2", *(f"outer.{at}.layers.{on}" for at in (0, 1) for on in (0, 1))]
    leaving = {id(piece.parameter) for block in blocks for piece in block.pieces}
    named = {name for name, weight in model.named_parameters() if id(weight) in leaving}
    assert "blocks.0.up.weight" not in named, "tied"
    assert "blocks.1.up.bias" not in named, "a view"
    assert "blocks.2.up.bias" in named
    assert "blocks.2.scale" not in named, "too small"
    assert not any(name.startswith(("embed", "head")) for name in named)


def test_a_weight_that_changed_between_forward_and_backward_is_said() -> None:
    model = Model()
    stream = stream_on(model)
    with stream.step():
        out = model(inputs())
    with torch.no_grad():
        model.blocks[2].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class ByData(Mixer):
    """As adapters read the weight that they add to: not by the parameter, but by what it holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.nn.functional.linear(x, self.out[0].weight.data)


def test_a_weight_that_is_read_by_its_data_is_the_same_after_steps_too() -> None:
    found = []
    for around in (False, True):
        model = Model(depth=0)
        torch.manual_seed(6)
        model.blocks.extend(ByData() for _ in range(3))
        stream = stream_on(model) if around else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            found.append(trained(model) if stream is None else trained(model, stream.step))
            if stream is not None:
                stream.go_home()
            optimizer.step()
    assert all(map(same, found[:3], found[3:]))


def test_a_forward_pass_that_fails_leaves_every_weight_at_home() -> None:
    model = Model()
    homes = [weight.data_ptr() for weight in model.parameters()]
    stream = stream_on(model)
    trained(model, stream.step)
    with pytest.raises(RuntimeError, match="shape"), stream.step():
        model.head(model.blocks[0](model.embed(inputs())).reshape(-1, 5))
    assert [weight.data_ptr() for weight in model.parameters()] == homes


def test_a_step_before_they_are_home_is_not_lost() -> None:
    """Of somebody who calls backward by himself."""
    models = Model(), Model()
    stream = stream_on(models[1])
    for model in models:
        with stream.step() if model is models[1] else nullcontext():
            loss = model(inputs()).square().mean()
        loss.backward()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    stream.go_home()
    assert same(*(dict(model.named_parameters()) for model in models))


def through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(2)


def with_a_version(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def as_other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data * 2


@pytest.mark.parametrize("where", ["before its own block runs", "in its own block"])
@pytest.mark.parametrize("write", [through_data, with_a_version, as_other_memory])
def test_what_is_written_to_a_weight_on_its_way_is_read_and_kept(
    request: pytest.FixtureRequest, write: Callable[..., None], where: str
) -> None:
    """In the first step and in later ones, when the block after this one is in a slot already."""
    models = Model().requires_grad_(False), Model().requires_grad_(False)
    for model in models:
        model.embed.requires_grad_(True)
        writer = model.blocks[2 if where == "in its own block" else 1]
        weight = model.blocks[2].down.weight
        writer.up.register_forward_hook(lambda *given, weight=weight: write(weight))
    stock, ours = models
    stream, patches = stream_on(ours), Patches()
    request.addfinalizer(patches.uninstall)
    patches.install(Patch(nn.Parameter, "data", partial(watched, stream)))
    for _ in range(3):
        assert same(trained(ours, stream.step), trained(stock))
        stream.go_home()
        assert all(map(torch.equal, ours.parameters(), stock.parameters()))
    stream.remove()


def test_what_has_moved_leaves_nothing_behind() -> None:
    """Not the memory of the device that its weights were loaded to."""
    blocks = find_blocks([Model()])
    pieces = [piece for block in blocks for piece in block.pieces]
    before = [piece.parameter.untyped_storage()._weak_ref() for piece in pieces]
    for piece in pieces:
        piece.move(like(piece.parameter))
    assert all(map(torch.UntypedStorage._expired, before))
    let_go(before)


def test_a_slot_that_somebody_looks_at_is_left_to_him() -> None:
    model = Model()
    stream = stream_on(model)
    kept: list[torch.Tensor] = []
    hook = model.blocks[1].register_forward_pre_hook(lambda module, args: kept.append(module.up.weight.detach()))
    for _ in range(3):
        trained(model, stream.step)
    hook.remove()
    stream.go_home()
    assert len(kept) == 6
    assert all(seen.equal(model.blocks[1].up.weight) for seen in kept), "none was poisoned"
    assert stream.kept >= 5
    assert stream.slot_bytes <= 2 * stream.blocks[0].size


class Faulty(Lane):
    def __init__(self, nth: int, kind: type[Exception]) -> None:
        super().__init__(CPU)
        self.calls, self._nth, self._kind = 0, nth, kind

    def copy(self, moves: Iterable[Move], *after: Any) -> None:
        self.calls += 1
        if self.calls == self._nth:
            raise self._kind("a copy failed")
        super().copy(moves, *after)


@pytest.mark.parametrize("kind", [RuntimeError, StillUnderWay])
def test_any_copy_may_fail(kind: type[Exception]) -> None:
    expected = trained(Model())
    for nth in range(1, 34):
        model, lane = Model(), Faulty(nth, kind)
        homes = [weight.data_ptr() for weight in model.parameters()]
        stream = stream_on(model, lane=lane)
        assert same(trained(model, stream.step), expected)
        stream.go_home()
        assert [weight.data_ptr() for weight in model.parameters()] == homes
        assert stream.failed == (1 if lane.calls >= nth else 0)


class Shuffled(Model):
    """Blocks in the order that is asked for."""

    order: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for at in self.order:
            x = self.blocks[at](x)
        return self.head(x)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_blocks_gives_the_same_bits(data: st.DataObject) -> None:
    """The order is a hint: another one each time, blocks that are used twice or not at all."""
    model, plain = Shuffled(), Shuffled()
    slots = data.draw(st.integers(1, 3))
    stream = stream_on(model, slots=slots)
    for _ in range(3):
        model.order = plain.order = data.draw(st.lists(st.integers(0, 3), max_size=6).map(tuple))
        assert same(trained(model, stream.step), trained(plain))
        assert stream.slot_bytes <= slots * stream.blocks[0].size


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(0, 1500), st.integers(1, 3))
def test_as_many_of_the_last_blocks_stay_as_the_budget_has_room_for(sizes: list[int], budget: int, slots: int) -> None:
    def taken(kept: int) -> int:
        leaving = sizes[: len(sizes) - kept]
        return sum(sizes[len(leaving) :]) + slots * max(leaving, default=0)

    kept = staying(sizes, budget, slots)
    assert kept == 0 or taken(kept) <= budget
    assert kept == len(sizes) or taken(kept + 1) > budget


def test_the_last_blocks_of_the_forward_pass_stay() -> None:
    """In the order in which they ran, which need not be the lists'; the others are still brought."""
    model, plain = Shuffled(), Shuffled()
    model.order = plain.order = (2, 0, 3, 1)
    expected = trained(plain)
    stream = stream_on(model)
    trained(model, stream.step)
    stay = stream.let_stay(4 * stream.blocks[0].size)
    assert [block.name for block in stay] == ["blocks.3", "blocks.1"], "two more are the slots'"
    before = stream.streamed
    assert same(trained(model, stream.step), expected)
    assert stream.streamed > before
    assert len(stream.let_stay(1 << 30)) == 6
    assert same(trained(model, stream.step), expected)
    assert stream.slot_bytes == 0
