"""Gradients in the pool: stock's to the bit over windows, clipped, scaled and stepped, in place or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from simpletuner_gh200.memory.lane import Lane, Move, StillUnderWay, lanes
from simpletuner_gh200.model.blocks import find_blocks
from simpletuner_gh200.model.catching import CaughtOptimizer, HostPool, Keeper
from simpletuner_gh200.model.gradients import PooledGradients
from simpletuner_gh200.model.placement import Placement
from simpletuner_gh200.model.slots import WeightStream
from simpletuner_gh200.model.streaming import StreamedOptimizer
from simpletuner_gh200.model.tensors import move_to
from tests.unit.model.momentum import Momentum
from tests.unit.model.test_model_weights import Model, inputs, poison

CPU = torch.device("cpu")


def run(step: Callable[[int, nn.Module, torch.Tensor], None], model: Model, *, to_none: bool) -> list[torch.Tensor]:
    """Three windows of three micro-batches; every gradient and weight after each."""
    seen: list[torch.Tensor] = []
    for window in range(3):
        for micro in range(3):
            step(micro, model, inputs() * (window + micro + 1))
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        seen += [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        step(-1, model, torch.empty(0))
        seen += [weight.detach().clone() for weight in model.parameters()]
        model.zero_grad(set_to_none=to_none)
    return seen


def plainly(model: Model) -> Callable[[int, nn.Module, torch.Tensor], None]:
    optimizer = Momentum(list(model.parameters()), lr=0.1)

    def step(micro: int, model: nn.Module, batch: torch.Tensor) -> None:
        if micro < 0:
            optimizer.step()
        else:
            model(batch).square().mean().backward()

    return step


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_windows_are_stocks_to_the_bit(streamed: bool, to_none: bool, at_once: bool) -> None:
    """With weights in slots as well: weights, gradients and state of a group cross together."""
    stock = Model()
    expected = run(plainly(stock), stock, to_none=to_none)
    model, pool = Model(), HostPool(1 << 24)
    blocks = find_blocks([model])
    for block in blocks:
        for piece in block.pieces:
            move_to(piece.parameter, pool.take(piece.parameter.data))
    homes = {id(piece.parameter): piece.parameter.data_ptr() for block in blocks for piece in block.pieces}
    stream = WeightStream(blocks, lanes(CPU)[1], released=poison)
    stream.install([model])
    gradients = PooledGradients(pool, lanes(CPU)[0], at_once=at_once)
    gradients.install(model.parameters())
    optimizer = Momentum(list(model.parameters()), lr=0.1)
    caught = CaughtOptimizer(optimizer, Keeper(pool, Placement("cpu_first", 0)))
    taken: Any = StreamedOptimizer(caught, lanes(CPU), room=3000) if streamed else caught
    places: list[int] = []

    def step(micro: int, model: nn.Module, batch: torch.Tensor) -> None:
        if micro < 0:
            taken.step(optimizer.step)
            return
        with stream.step():
            out = model(batch)
        out.square().mean().backward()
        stream.go_home()
        gradients.settle()
        assert all(pool.holds(weight.grad) for weight in model.parameters() if weight.grad is not None)
        places.append(next(iter(model.parameters())).grad.data_ptr())

    found = run(step, model, to_none=to_none)
    assert len(found) == len(expected)
    assert len(set(places)) == 1, "one memory for all windows"
    tensors, size = gradients.count()
    assert tensors == len(list(model.parameters()))
    assert size == sum(weight.nbytes for weight in model.parameters())
    assert {id(p.parameter): p.parameter.data_ptr() for block in blocks for p in block.pieces} == homes
    if streamed:
        assert taken.steps == 2
        state = sum(value.nbytes for values in optimizer.state.values() for value in values.values())
        weights = sum(piece.size for block in blocks for piece in block.pieces)
        assert taken.staged_bytes >= 2 * (state + weights + size), "all of it, once each way"
    assert all(left.equal(right) for left, right in zip(found, expected, strict=True))


def test_minus_zero_stays_and_what_stock_keeps_stays() -> None:
    weight = nn.Parameter(torch.zeros(4))
    gradients = PooledGradients(HostPool(1 << 20), lanes(CPU)[0])
    gradients.install([weight])
    (weight * torch.tensor([-0.0, 1, -1, 0])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.signbit().tolist() == [True, False, True, False]
    kept = weight.grad
    weight.grad = None
    (weight * 2).sum().backward()
    assert kept.tolist() == [0, 1, -1, 0], "somebody still looks at it"
    assert weight.grad.tolist() == [2] * 4
    gradients.remove()
    weight.grad = None
    (weight * 3).sum().backward()
    assert gradients.moved == 2 * 16


def test_small_ones_and_a_full_pool() -> None:
    small, large = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(400))
    gradients = PooledGradients(HostPool(1000, "a test"), lanes(CPU)[0], smallest=64)
    gradients.install([small, large])
    with pytest.raises(torch.OutOfMemoryError, match="does not fit into Grace memory"):
        (small.sum() + large.sum()).backward()
    assert gradients.count() == (0, 0)


class Faulty(Lane):
    def __init__(self, kind: type[Exception]) -> None:
        super().__init__(CPU)
        self._kind = kind

    def copy(self, moves: Iterable[Move], *after: Any) -> None:
        raise self._kind("a copy failed")


@pytest.mark.parametrize("kind", [RuntimeError, StillUnderWay])
def test_a_gradient_that_can_not_be_moved_stays(kind: type[Exception]) -> None:
    weight, pool = nn.Parameter(torch.zeros(4)), HostPool(1 << 20)
    gradients = PooledGradients(pool, Faulty(kind))
    gradients.install([weight])
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2] * 4
    assert not pool.holds(weight.grad)
    assert gradients.failed == 1
