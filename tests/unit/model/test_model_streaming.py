"""The streaming step: chunks, gradients shown by turns, everything home again; the same result to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from simpletuner_gh200.memory.lane import lanes
from simpletuner_gh200.model.catching import CaughtOptimizer, HostPool, Keeper
from simpletuner_gh200.model.placement import Placement
from simpletuner_gh200.model.streaming import StreamedOptimizer, chunks
from tests.unit.model.momentum import Momentum


@given(some.lists(some.integers(0, 100)), some.integers(1, 150))
def test_chunks_are_all_parameters_in_order_and_fit(sizes: list[int], room: int) -> None:
    found = chunks(sizes, room)
    assert [index for chunk in found for index in chunk] == list(range(len(sizes)))
    for chunk in found:
        assert sum(sizes[index] for index in chunk) <= room or len(chunk) == 1


def make(room: int) -> tuple[list[torch.nn.Parameter], Momentum, StreamedOptimizer, CaughtOptimizer]:
    weights = [torch.nn.Parameter(torch.ones(100 * (number + 1))) for number in range(5)]
    optimizer = Momentum(weights, lr=0.1)
    caught = CaughtOptimizer(optimizer, Keeper(HostPool(1 << 20), Placement("cpu_first", 0)))
    return weights, optimizer, StreamedOptimizer(caught, lanes(torch.device("cpu")), room=room), caught


def show_gradients(weights: list[torch.nn.Parameter], number: int) -> None:
    for index, weight in enumerate(weights):
        weight.grad = None if index == 3 and number < 2 else torch.full_like(weight, 0.1 * number + index)


@pytest.mark.parametrize("room", [1, 2000, 1 << 20])
def test_the_same_to_the_bit_and_all_of_it_home_again(room: int) -> None:
    plain_weights, plain, _, _ = make(room)
    weights, optimizer, streamed, caught = make(room)
    for number in range(5):
        show_gradients(plain_weights, number)
        show_gradients(weights, number)
        plain.step()
        streamed.step(optimizer.step)
        assert [w.grad is None for w in weights] == [w.grad is None for w in plain_weights]
    assert all(mine.equal(theirs) for mine, theirs in zip(weights, plain_weights, strict=True))
    for mine, theirs in zip(weights, plain_weights, strict=True):
        for name in ("momentum", "square"):
            assert optimizer.state[mine][name].equal(plain.state[theirs][name])
    assert caught.tally.tensors == 10
    assert streamed.steps == 3, "steps that make state are not streamed"
    assert streamed.staged_bytes >= 3 * caught.tally.bytes


@pytest.mark.parametrize(("arguments", "streamed_steps"), [((None,), 1), ((lambda: 0.0,), 0)])
def test_a_closure_is_called_once_and_none_is_no_closure(arguments: tuple[Any, ...], streamed_steps: int) -> None:
    weights, optimizer, streamed, _ = make(room=2000)
    show_gradients(weights, 2)
    streamed.step(optimizer.step)
    given: list[Any] = []

    def with_closure(closure: Any = None) -> None:
        given.append(closure)
        optimizer.step()

    streamed.step(with_closure, *arguments)
    assert streamed.steps == streamed_steps
    assert set(given) == set(arguments)
    assert (len(given) > 1) == bool(streamed_steps)


def test_a_step_sees_the_gradients_of_its_chunk_only() -> None:
    weights, optimizer, streamed, _ = make(room=2000)
    show_gradients(weights, 2)
    streamed.step(optimizer.step)
    seen: list[int] = []

    def watched() -> None:
        seen.append(sum(weight.grad is not None for weight in weights))
        optimizer.step()

    streamed.step(watched)
    assert sum(seen) == 5
    assert max(seen) < 5
