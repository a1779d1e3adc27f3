"""For any blocks and any machine: limits hold, bytes add up, and a better machine never costs more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.model.activations.policy import Block, Rates, choose

sizes = st.integers(0, 1 << 36)
rates = st.none() | st.builds(Rates, st.floats(1e6, 1e12), st.floats(1e6, 1e12), st.floats(1.0, 1e15))


@st.composite
def blocks(draw: st.DrawFn) -> list[Block]:
    found = []
    for _ in range(draw(st.integers(0, 12))):
        saved = draw(sizes)
        found.append(Block(saved, draw(st.floats(0, 1e15)), draw(st.integers(0, saved)), draw(st.booleans())))
    return found


@given(blocks(), sizes, sizes, rates)
def test_limits_hold_and_bytes_add_up(model: list[Block], room: int, grace: int, link: Rates | None) -> None:
    mix = choose(model, hbm_room=room, grace_limit=grace, rates=link)
    assert len(mix.choices) == len(model)
    assert mix.offloaded <= grace
    assert mix.fits == (mix.kept <= room)
    assert mix.kept + mix.offloaded + mix.recomputed == sum(block.saved for block in model)
    assert all(block.recomputable for block, choice in zip(model, mix.choices, strict=True) if choice == "recompute")
    if sum(block.saved for block in model) <= room:
        assert set(mix.choices) <= {"keep"}


@given(blocks(), sizes, sizes, rates)
def test_nothing_is_paid_for_that_already_fits(model: list[Block], room: int, grace: int, link: Rates | None) -> None:
    """Whatever was chosen last could not have been left: without the dearest choice it would not fit."""
    mix = choose(model, hbm_room=room, grace_limit=grace, rates=link)
    paid = [
        block.saved - (block.inputs if choice == "recompute" else 0)
        for block, choice in zip(model, mix.choices, strict=True)
        if choice != "keep"
    ]
    if mix.fits and paid:
        assert mix.kept + max(paid) > room
