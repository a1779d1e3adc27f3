"""How a resumed run goes on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from simpletuner_gh200.ramp.schedule import GH200GradientRamp, Origin, RampState, resume

RAMP = GH200GradientRamp(4, 32, 60, train_batch_size=2, world_size=2)


def test_a_state_survives_json() -> None:
    state = RampState.after(RAMP, 9)
    assert RampState.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert state.samples == sum(window.effective for window in RAMP.windows(9))
    assert state.accumulation == RAMP.accumulation(8)
    assert RampState.after(RAMP, 0).accumulation == 0


def test_a_fresh_run_needs_no_state() -> None:
    assert resume(RAMP, None, 0).ramp == RAMP
    assert resume(RAMP, None, 0).notices == ()


def test_a_checkpoint_without_state_resumes_and_says_so() -> None:
    resumed = resume(RAMP, None, 12)
    assert resumed.ramp == RAMP
    assert "no ramp state" in resumed.notices[0]


def test_a_state_of_another_step_is_not_believed() -> None:
    resumed = resume(RAMP, RampState.after(RAMP, 5), 12)
    assert resumed.ramp == RAMP
    assert "optimizer step 5" in resumed.notices[0]


def test_a_changed_schedule_is_reported_and_goes_on_by_samples() -> None:
    saved = RampState.after(RAMP, 10)
    resumed = resume(replace(RAMP, target=64, curve="linear"), saved, 10)
    assert resumed.ramp.origin == Origin(10, saved.samples)
    assert resumed.ramp.length == RAMP.length
    assert "target changed from 32 to 64" in resumed.notices[0]
    assert "curve changed from quadratic to linear" in resumed.notices[0]


def test_a_changed_length_counts_in_the_ranks_of_now() -> None:
    saved = RampState.after(RAMP, 10)
    resumed = resume(replace(RAMP, ramp_steps=100, world_size=4), saved, 10)
    assert resumed.ramp.length == 100 * 2 * 4


def test_more_ranks_halve_the_accumulation_at_the_same_effective_batch() -> None:
    ramp = replace(RAMP, initial=32)
    saved = RampState.after(ramp, 3)
    resumed = resume(replace(ramp, world_size=4), saved, 3)
    assert ramp.window(3).effective == resumed.ramp.window(3).effective == 32
    assert (ramp.accumulation(3), resumed.ramp.accumulation(3)) == (8, 4)
    assert "world_size changed from 2 to 4" in resumed.notices[0]


def test_steps_before_the_origin_are_refused() -> None:
    with pytest.raises(ValueError, match="before this schedule"):
        replace(RAMP, origin=Origin(5, 40)).window(4)
