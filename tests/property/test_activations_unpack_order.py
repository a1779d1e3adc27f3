"""Saved tensors asked for in any order, again or never: torch leaves it open, so nothing of ours may need one.

A learned order only says what to fetch ahead. The device here is small, and copies over the link are made when somebody
waits for them: a tensor that is used too early is full of the wrong bytes, one that is held too long shows as memory.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from simpletuner_gh200.memory.lane import Lane, Move, flat
from simpletuner_gh200.model.activations import offload
from simpletuner_gh200.model.activations.shape import AT_MOST
from tests.unit.model.saving import Engine, gradients, layers, same

COUNT, SIZE = 24, 32
"""Tensors of a step, and numbers in each."""
CHANCES = some.integers(0, 1 << 32).map(random.Random)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Later(Lane):
    """Copies are made when they are waited for, or found done; the device has room for so many that came back."""

    def __init__(self, chance: random.Random, room: int = 1 << 50) -> None:
        super().__init__(torch.device("cpu"))
        self._chance, self._room = chance, room
        self._there: weakref.WeakSet[Any] = weakref.WeakSet()
        self._tickets = 0
        self.under_way: dict[int, list[Move]] = {}

    def copy(self, moves: Iterable[Move], *after: Any) -> int:
        self._tickets += 1
        self.under_way[self._tickets] = list(moves)
        for to, _source, size in moves:
            if sum(storage.nbytes() for storage in self._there) + size > self._room:
                del self.under_way[self._tickets]
                raise torch.OutOfMemoryError("the device is full")
            self._there.add(to[0])
            flat(to, size).fill_(255)
        return self._tickets

    def done(self, ticket: int) -> bool:
        done = self._chance.random() < 0.5
        if done:
            self._make(ticket)
        return done

    def wait(self, ticket: int, brought: torch.Tensor | None = None) -> None:
        self._make(ticket)

    def _make(self, ticket: int) -> None:
        super().copy(self.under_way.pop(ticket))  # each is waited for once


def sides(chance: random.Random, room: int = 1 << 50) -> dict[str, Later]:
    return {"out": Later(chance), "back": Later(chance, room)}


def packed(engine: Engine, first: int, every: int = 5) -> list[Any]:
    """What the nodes of a graph would hold: tensors full of their numbers, ``every`` so many saved twice, as a view."""
    with engine.step("a", list, []):
        handles = []
        for number in range(first, first + COUNT):
            saved = torch.full((SIZE,), float(number))
            handles.append(engine._pack(saved))
            if number % every == 0:
                handles.append(engine._pack(saved.view(4, -1).t()))
        return handles


def right(engine: Engine, handle: Any, number: int) -> bool:
    there = engine._unpack(handle)
    return there.numel() == SIZE and bool(there.eq(number).all())


def numbers(first: int) -> list[int]:
    return [number for number in range(first, first + COUNT) for _ in range(1 + (number % 5 == 0))]


def nothing_is_left(engine: Engine, lanes: dict[str, Later]) -> None:
    engine.finish()
    assert engine.arena.in_use == 0
    assert not any(lane.under_way for lane in lanes.values()), "every copy was waited for"


@settings(max_examples=40, deadline=None)
@given(CHANCES, some.sampled_from([0, 1, COUNT // 3]), some.sampled_from([1 << 30, 4096]))
def test_any_order_again_or_never(chance: random.Random, unwanted: int, limit: int) -> None:
    """As where graphs are kept: what was asked for once may be asked for again, with others in between."""
    lanes = sides(chance)
    engine = Engine(**lanes, limit=limit, in_flight=SIZE * 4 * 3)
    for step in range(4):
        handles = dict(enumerate(packed(engine, step * 100)))
        asked = chance.sample(sorted(handles), len(handles) - unwanted)
        asked += chance.choices(asked, k=COUNT // 2)
        assert all(right(engine, handles[at], numbers(step * 100)[at]) for at in asked)
        handles.clear()
        assert engine.failed == 0
    nothing_is_left(engine, lanes)


@settings(max_examples=40, deadline=None)
@given(CHANCES, some.integers(1, COUNT))
def test_what_is_not_wanted_next_never_fills_the_device(chance: random.Random, stride: int) -> None:
    """Backward lets go of each at once. Orders that jump leave behind what was fetched ahead of them."""
    lanes = sides(chance, room=(AT_MOST + 2) * SIZE * 4)
    engine = Engine(**lanes)
    for step in range(4):
        handles = dict(enumerate(packed(engine, 1 + step * 100, every=1000)))
        order = sorted(handles, reverse=True)
        if step == 2:
            order.sort(key=lambda at: at % stride)
        elif step == 3:
            chance.shuffle(order)
        for at in order:
            assert right(engine, handles.pop(at), 1 + step * 100 + at)
        assert engine.failed == 0, f"step {step}"
    nothing_is_left(engine, lanes)


@settings(max_examples=10, deadline=None)
@given(CHANCES)
def test_gradients_are_the_same_to_the_bit(chance: random.Random) -> None:
    """Through autograd: whenever a node asks, others that it could ask for are unpacked first, in any order."""
    model, x = layers(6), torch.linspace(-1, 1, 64).reshape(4, 16)
    plain = gradients(model(x), model.parameters())
    lanes = sides(chance)
    engine = Engine(**lanes)
    pack, unpack, alive = engine._pack, engine._unpack, []

    def remembered(tensor: torch.Tensor) -> Any:
        alive.append(pack(tensor))
        return alive[-1]

    def shuffled(handle: Any) -> torch.Tensor:
        for other in chance.sample(alive, 3):
            unpack(other)
        return unpack(handle)

    engine._pack, engine._unpack = remembered, shuffled  # type: ignore[method-assign]
    for _step in range(3):
        assert same(engine.run(lambda: model(x), model.parameters(), [x]), plain)
        alive.clear()
    engine._pack, engine._unpack = pack, unpack  # type: ignore[method-assign]
    nothing_is_left(engine, lanes)


def test_a_device_without_room_for_one_says_so_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_bytes: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device is full")

    lanes = sides(random.Random(1), room=0)
    engine = Engine(**lanes)
    handles = packed(engine, 0)
    engine.finish()
    with monkeypatch.context() as patched:
        patched.setattr(offload, "flat", full)
        for _attempt in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
                engine._unpack(handles[0])
    assert right(engine, handles[0], 0), "once there is room again"
    handles.clear()
    nothing_is_left(engine, lanes)


def test_a_wait_that_fails_is_made_up_for() -> None:
    """Neither is a tensor used before it is there, nor memory given to others while a copy may be at it."""

    class Refusing(Later):
        refuses = 0

        def wait(self, ticket: int, brought: torch.Tensor | None = None) -> None:
            if Refusing.refuses:
                Refusing.refuses -= 1
                raise RuntimeError("no event")
            super().wait(ticket)

    def in_the_end(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError:
            return call()

    lanes: dict[str, Later] = {"out": Refusing(random.Random(2)), "back": Refusing(random.Random(3))}
    engine = Engine(**lanes)
    for nth in range(8):
        handles = packed(engine, 0)
        Refusing.refuses = 1
        for at, number in reversed(list(enumerate(numbers(0)))):
            if at == len(handles) - nth:
                in_the_end(engine.finish)
            assert in_the_end(partial(right, engine, handles[at], number))
        assert not Refusing.refuses
        handles.clear()
        nothing_is_left(engine, lanes)


def test_a_graph_that_is_kept_comes_ahead_all_the_same() -> None:
    """What was asked for once lives on, and is not taken for something that nobody wants."""
    engine = Engine(**sides(random.Random(3)))
    for _step in range(2):
        before, handles = engine.late, packed(engine, 0)
        engine.finish()
        assert all(right(engine, handles[at], number) for at, number in reversed(list(enumerate(numbers(0)))))
    assert engine.late - before == 1
