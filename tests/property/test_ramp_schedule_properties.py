"""The ramp's schedule, whatever its parameters."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.ramp.schedule import GH200GradientRamp, RampState, rate_factor, resume

sizes = st.integers(1, 200)


@st.composite
def ramps(draw: st.DrawFn) -> GH200GradientRamp:
    curve = draw(st.sampled_from(["quadratic", "linear", "stepwise"]))
    return GH200GradientRamp(
        initial=draw(sizes),
        target=draw(sizes),
        ramp_steps=draw(st.integers(1, 300)),
        train_batch_size=draw(st.integers(1, 9)),
        world_size=draw(st.integers(1, 8)),
        curve=curve,
        increment=draw(st.integers(1, 60)) if curve == "stepwise" else None,
    )


def by_the_rule(ramp: GH200GradientRamp, count: int) -> list[int]:
    """The contract's rule, window by window, with nothing clever in it."""
    consumed, found = 0, []
    for _ in range(count):
        share = Fraction(consumed, ramp.ramp_steps)
        distance = ramp.target - ramp.initial
        if share >= 1 or distance == 0:
            wanted = Fraction(ramp.target)
        elif ramp.curve == "stepwise":
            stairs = -(-abs(distance) // ramp.increment)
            climbed = min(int(share * stairs) * ramp.increment, abs(distance))
            wanted = Fraction(ramp.initial + (climbed if distance > 0 else -climbed))
        else:
            wanted = ramp.initial + distance * share ** (2 if ramp.curve == "quadratic" else 1)
        found.append(max(1, round(wanted / (ramp.train_batch_size * ramp.world_size))))
        consumed += found[-1]
    return found


@given(ramps(), st.integers(0, 80))
def test_windows_follow_the_rule_of_the_contract(ramp: GH200GradientRamp, count: int) -> None:
    expected = by_the_rule(ramp, count)
    assert [window.accumulation for window in ramp.windows(count)] == expected
    assert [ramp.accumulation(step) for step in range(count)] == expected


@given(ramps(), st.integers(1, 120))
def test_windows_are_contiguous_and_hold_whole_micro_batches(ramp: GH200GradientRamp, count: int) -> None:
    consumed = 0
    for step, window in enumerate(ramp.windows(count)):
        assert (window.step, window.samples) == (step, consumed)
        assert window.effective == window.accumulation * ramp.train_batch_size * ramp.world_size
        assert window == ramp.window(step)
        consumed += window.effective


@given(ramps())
def test_the_ramp_is_monotone_and_ends_at_its_target(ramp: GH200GradientRamp) -> None:
    counts = [window.accumulation for window in ramp.windows(ramp.ramp_steps + 2)]
    assert counts == sorted(counts, reverse=ramp.initial > ramp.target)
    target = max(1, round(Fraction(ramp.target, ramp.unit)))
    assert counts[-1] == ramp.target_accumulation == target
    after = [window for window in ramp.windows(ramp.ramp_steps + 2) if window.samples >= ramp.ramp_steps * ramp.unit]
    assert {window.accumulation for window in after} == {target}


@given(ramps())
def test_changes_are_exactly_where_the_count_changes(ramp: GH200GradientRamp) -> None:
    windows = list(ramp.windows(ramp.ramp_steps + 2))
    different = [window for before, window in pairwise(windows) if before.accumulation != window.accumulation]
    assert list(ramp.changes) == [windows[0], *different]


@given(ramps(), st.integers(1, 200))
def test_an_unchanged_resume_gives_the_uninterrupted_windows(ramp: GH200GradientRamp, step: int) -> None:
    saved = RampState.from_json(RampState.after(ramp, step).to_json())
    resumed = resume(ramp, saved, step)
    assert resumed.notices == ()
    assert resumed.ramp == ramp


@settings(max_examples=60)
@given(ramps(), st.integers(1, 60), st.integers(1, 8))
def test_other_ranks_go_on_by_consumed_samples(ramp: GH200GradientRamp, step: int, world: int) -> None:
    saved = RampState.after(ramp, step)
    asked = replace(ramp, world_size=world)
    resumed = resume(asked, saved, step)
    if world == ramp.world_size:
        assert resumed.ramp == ramp
        return
    assert len(resumed.notices) == 1
    first = resumed.ramp.window(step)
    assert first.samples == saved.samples
    # The same curve over samples: what is wanted does not jump, and the end lies at the same sample.
    assert resumed.ramp.wanted(saved.samples) == ramp.wanted(saved.samples)
    assert resumed.ramp.length == ramp.length
    # And a second, unchanged resume follows the changed schedule, not the original one.
    later = step + 5
    again = resume(asked, RampState.from_json(RampState.after(resumed.ramp, later).to_json()), later)
    assert again.notices == ()
    assert again.ramp == resumed.ramp


@given(ramps(), st.integers(0, 100), st.sampled_from(["linear", "sqrt"]))
def test_the_rate_rule_is_one_at_the_target(ramp: GH200GradientRamp, step: int, rule: str) -> None:
    factor = rate_factor(ramp, step, rule)
    ratio = Fraction(ramp.accumulation(step), ramp.target_accumulation)
    assert factor > 0
    assert (factor < 1, factor == 1, factor > 1) == (ratio < 1, ratio == 1, ratio > 1)
    assert rate_factor(ramp, ramp.ramp_steps + 1, rule) == 1
    assert rate_factor(ramp, step, "none") == 1
