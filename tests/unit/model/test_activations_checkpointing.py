"""Gradient checkpointing, block by block: past it where activations are kept or moved, through it where recomputed."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from tests.unit.model.saving import Engine, gradients, layers, same

checkpoint = inspect.unwrap(torch.utils.checkpoint.checkpoint)
"""Without the wrapper that would bring the compiler in first."""
X = torch.linspace(-1, 1, 64).reshape(4, 16)


class Checkpointed:
    """Blocks in a row, each called through checkpointing as models do it; counts how often each one ran."""

    def __init__(self, engine: Engine | None = None, count: int = 6) -> None:
        self.model = layers(count)
        self.engine = engine
        self.dropout = torch.nn.Dropout(0.5)
        self.ran: Counter[int] = Counter()

    def block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        self.ran[number] += 1
        return x + self.dropout(self.model[number](x))

    def forward(self) -> torch.Tensor:
        torch.manual_seed(7)
        x = X
        for number in range(len(self.model)):
            x = self._call(number, x)
        return x

    def _call(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if self.engine is None:
            return self.block(number, x)
        options = {"use_reentrant": False, "preserve_rng_state": True}
        return self.engine.checkpoint(checkpoint, lambda *args: self.block(number, *args), (x,), options, {})

    def parameters(self) -> Any:
        return self.model.parameters()


def plain() -> list[torch.Tensor]:
    model = Checkpointed()
    return gradients(model.forward(), model.parameters())


def test_no_block_is_recomputed_where_grace_has_room() -> None:
    engine = Engine()
    model = Checkpointed(engine)
    for _ in range(3):
        assert same(engine.run(model.forward, model.parameters(), [X]), plain())
    assert set(model.ran.values()) == {3}
    (shape,) = engine.shapes.values()
    assert shape.block_choices == ("offload",) * 6
    assert engine.moved > 0


def test_what_grace_can_not_hold_is_recomputed_and_nothing_else() -> None:
    whole = Engine()
    model = Checkpointed(whole)
    whole.run(model.forward, model.parameters(), [X])
    engine = Engine(limit=whole.moved // 2)
    model = Checkpointed(engine)
    for _ in range(4):
        model.ran.clear()
        assert same(engine.run(model.forward, model.parameters(), [X]), plain())
        assert engine.arena.held <= whole.moved // 2
    (shape,) = engine.shapes.values()
    again = {number for number, times in model.ran.items() if times == 2}
    assert again == {at for at, choice in enumerate(shape.block_choices) if choice == "recompute"}
    assert 2 <= len(again) < 6
    assert engine.surprises == 0, "the order was learned once more for the blocks that are left"


def test_a_first_step_does_not_fill_hbm_with_what_grace_can_not_hold() -> None:
    engine = Engine(limit=4096)
    model = Checkpointed(engine)
    assert same(engine.run(model.forward, model.parameters(), [X]), plain())
    assert sum(times == 2 for times in model.ran.values()) >= 4, "recomputed as configured"


def test_a_block_that_stays_is_neither_moved_nor_recomputed() -> None:
    engine = Engine()
    model = Checkpointed(engine)
    engine.run(model.forward, model.parameters(), [X])
    engine.hbm.size = 1 << 30
    before = engine.moved
    model.ran.clear()
    assert same(engine.run(model.forward, model.parameters(), [X]), plain())
    assert engine.moved == before
    assert set(model.ran.values()) == {1}


def test_outside_a_step_checkpointing_is_as_it_was() -> None:
    engine = Engine()
    model = Checkpointed(engine)
    assert same(gradients(model.forward(), model.parameters()), plain())
    assert set(model.ran.values()) == {2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_nested_checkpoint_belongs_to_the_block_around_it(reentrant: bool) -> None:
    engine = Engine()
    weight = torch.ones(8, requires_grad=True)
    ran: list[str] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        ran.append("inner")
        return x.exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        options = {"use_reentrant": reentrant}
        return engine.checkpoint(checkpoint, inner, (x * 2,), options, {}).sin()

    def forward() -> torch.Tensor:
        return engine.checkpoint(checkpoint, outer, (weight * 1,), {"use_reentrant": reentrant}, {})

    expected = gradients((weight * 2).exp().sin(), [weight])
    assert same(engine.run(forward, [weight]), expected)
    assert ran == ["inner"]
    assert engine.step_now is None


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # as stock, of what is nested
@pytest.mark.parametrize(("reentrant", "selective"), [(False, False), (True, False), (False, True)])
def test_a_checkpoint_in_a_recomputed_block_is_recomputed_with_it(reentrant: bool, selective: bool) -> None:
    """Grace has room for one block and no more; a block of its own choice of what to recompute is never ours."""
    engine = Engine(limit=4096)
    model = Checkpointed()
    options: dict[str, Any] = {"use_reentrant": reentrant}
    outer_options = {**options, "context_fn": lambda: (nullcontext(), nullcontext())} if selective else options

    def outer(number: int, x: torch.Tensor) -> torch.Tensor:
        inner = engine.checkpoint(checkpoint, lambda y: model.block(number, y), (x * 2,), options, {})
        return inner.sin().exp()

    def forward(checkpointed: bool) -> torch.Tensor:
        torch.manual_seed(7)
        x = X.clone().requires_grad_()
        for number in range(6):
            if checkpointed:
                x = engine.checkpoint(checkpoint, partial(outer, number), (x,), outer_options, {})
            else:
                x = model.block(number, x * 2).sin().exp()
        return x

    expected = gradients(forward(False), model.parameters())
    for _ in range(3):
        with engine.step("a", lambda: list(model.parameters()), []):
            loss = forward(True)
        for weight in model.parameters():
            weight.grad = None
        loss.sum().backward()
        assert same([weight.grad for weight in model.parameters()], expected)
    (shape,) = engine.shapes.values()
    assert len(shape.block_choices) == (0 if selective else 6), "what is nested counts as nothing of its own"
    assert selective or "recompute" in shape.block_choices
