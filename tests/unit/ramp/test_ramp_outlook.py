"""Settings to schedule, and what people are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.config.training import training_from
from simpletuner_gh200.errors import ConfigError
from simpletuner_gh200.ramp.outlook import NO_STEPS, Sizes, notices, outlook, outlook_of, whole_windows
from simpletuner_gh200.ramp.preview import RampPreview, preview
from simpletuner_gh200.ramp.schedule import GH200GradientRamp

BLOCK = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 4, "batch_rampup_steps": 40}


def test_the_target_defaults_to_the_configured_effective_batch() -> None:
    assert outlook(RampSettings(**BLOCK), Sizes(2, 3, 5, 100)).ramp.target == 30


def test_the_length_defaults_to_a_tenth_of_the_run_at_its_target() -> None:
    block = {"initial_effective_batch_size": 4, "target_effective_batch_size": 32}
    settings = RampSettings(enable_batch_size_rampup=True, **block)
    assert outlook(settings, Sizes(4, max_train_steps=1000)).ramp.ramp_steps == 800
    assert outlook(settings, Sizes(4, max_train_steps=1)).ramp.ramp_steps == 1


def test_the_quick_configuration_of_the_guides_is_explained_and_trains_at_its_batch() -> None:
    """Batch 32, initial 4, nothing else: neither steps nor a length, and no window below 32."""
    settings = RampSettings(enable_batch_size_rampup=True, initial_effective_batch_size=4)
    found = outlook(settings, Sizes(32))
    assert found.problems == ()
    (notice,) = found.notices
    assert "no ramp from 4 to 32 is possible" in notice
    assert notice.endswith(': "train_batch_size": 4, "target_effective_batch_size": 32'), "no ramp of one micro-batch"
    (known,) = outlook(settings, Sizes(32, max_train_steps=100)).notices
    assert known.endswith('"target_effective_batch_size": 32, "batch_rampup_steps": 80')
    assert {window.effective for window in found.ramp.windows(50)} == {32}
    assert "use fewer ranks" in outlook(settings, Sizes(8, 8)).notices[0]


def test_a_ramp_of_a_run_without_any_length_is_refused_with_the_reason() -> None:
    (problem,) = outlook(RampSettings(**BLOCK), Sizes(2, 3, 5, 0)).problems
    assert problem.where == "max_train_steps"
    assert "num_train_epochs" in problem.message
    assert outlook(RampSettings(**BLOCK), Sizes(4)).problems == (), "nothing to ramp"


def test_a_run_may_be_given_by_its_epochs() -> None:
    found = outlook(RampSettings(**BLOCK), Sizes(2, 3, 5, 0, 2.5))
    assert found.problems == ()
    assert "num_train_epochs 2.5 says how long the run is" in found.remarks[0]
    steps = outlook(RampSettings(**BLOCK), Sizes(2, 3, 5, 100, 2.5))
    assert steps.remarks == (), "steps decide where there are any"
    assert outlook(RampSettings(**BLOCK), Sizes(4, num_train_epochs=2)).remarks == (), "nothing to ramp"


def test_the_default_length_is_a_tenth_of_the_epochs_once_they_are_counted() -> None:
    block = {"initial_effective_batch_size": 4, "target_effective_batch_size": 32}
    settings = RampSettings(enable_batch_size_rampup=True, **block)
    assert outlook(settings, Sizes(4, num_train_epochs=3, micro_batches=120)).ramp.ramp_steps == 12
    assert outlook(settings, Sizes(4, num_train_epochs=3, micro_batches=5)).ramp.ramp_steps == 1


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7, 40, 41, 500])
def test_a_run_has_as_many_steps_as_there_are_whole_windows_in_its_data(micro_batches: int) -> None:
    ramp = GH200GradientRamp(4, 32, 20, train_batch_size=2, world_size=2)
    steps = whole_windows(ramp, micro_batches)
    lengths = [window.accumulation for window in ramp.windows(steps + 1)]
    assert sum(lengths[:steps]) <= micro_batches < sum(lengths)
    assert whole_windows(GH200GradientRamp(32, 4, 20, train_batch_size=2), 3) == 1, "at least one"


def test_a_configuration_is_judged_before_its_run() -> None:
    config = {"train_batch_size": 2, "gh200_optimizations": {**BLOCK, "target_effective_batch_size": 8}}
    config["num_train_epochs"] = 0
    assert outlook_of(training_from(config, config, {})).problems == (NO_STEPS,)
    for epochs, told in ((None, 1), ("2", 2)):
        config["num_train_epochs"] = epochs
        found = outlook_of(training_from(config, config, {}))
        assert found.problems == ()
        assert f"num_train_epochs {told} says" in found.remarks[0]
    config["max_train_steps"] = "20"
    assert outlook_of(training_from(config, config, {})) == replace(found, remarks=())
    assert outlook_of(training_from({}, {}, {})) is None


def test_the_schedule_of_epochs_is_shown_where_their_batches_are_given() -> None:
    config = {"train_batch_size": 2, "num_train_epochs": 2, "gh200_optimizations": BLOCK}
    with pytest.raises(ConfigError, match="give --batches too"):
        shown(config)
    report, _notes = preview(training_from(config, config, {}), batches=10)
    assert report.steps == whole_windows(report.ramp, 20)
    assert report.total_samples <= 2 * 20


@pytest.mark.parametrize(
    ("initial", "target", "told"),
    [
        (4, 32, []),
        (1, 32, ["below train_batch_size x ranks = 2 x 2 = 4: the accumulation is 1"]),
        (10, 32, ["initial_effective_batch_size 10 is not a multiple", "rounded to 8"]),
        (4, 33, ["target_effective_batch_size 33 is not a multiple", "rounded to 32"]),
        (32, 4, ["shrinks over the run, from 32 to 4"]),
        (8, 8, ["nothing to ramp"]),
    ],
)
def test_rounding_clamping_and_direction_are_told(initial: int, target: int, told: list[str]) -> None:
    found = "\n".join(notices(GH200GradientRamp(initial, target, 40, train_batch_size=2, world_size=2)))
    assert all(words in found for words in told)
    assert bool(found) == bool(told)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"initial_effective_batch_size": 0}, "initial_effective_batch_size"),
        ({"initial_effective_batch_size": -4}, "-4"),
        ({"batch_rampup_steps": 0}, "batch_rampup_steps"),
        ({"target_effective_batch_size": 0}, "target_effective_batch_size"),
        ({"target_effective_batch_size": 2.5}, "2.5"),
        ({"ramp_curve": "cubic"}, "'quadratic', 'linear', 'stepwise'"),
        ({"ramp_curve": "stepwise"}, "ramp_increment"),
        ({"ramp_increment": 0, "ramp_curve": "stepwise"}, "ramp_increment"),
        ({"initial_effective_batch_size": None}, "initial_effective_batch_size"),
        ({"batch_rampup_stepz": 3}, "batch_rampup_steps"),
    ],
)
def test_nonsense_is_a_configuration_error(change: dict[str, Any], named: str) -> None:
    block = {key: value for key, value in {**BLOCK, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        resolve({"gh200_optimizations": block}, {})
    assert named in str(refused.value)


def test_the_schedule_itself_refuses_nonsense_all_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        GH200GradientRamp(0, -1, 0, curve="stepwise")
    assert [problem.where for problem in refused.value.problems] == ["initial", "target", "ramp_steps", "increment"]


def shown(config: dict[str, Any], *, world: int | None = None) -> tuple[RampPreview, list[str]]:
    return preview(training_from(config, config, {}), world=world)


def test_a_configuration_needs_only_the_keys_that_matter() -> None:
    config = {"train_batch_size": 2, "max_train_steps": 20, "gh200_optimizations": BLOCK, "learning_rate": "anything"}
    report, notes = shown(config, world=2)
    assert notes == []
    assert report.ramp == GH200GradientRamp(4, 4, 40, train_batch_size=2, world_size=2)


def test_older_keys_at_top_level_enable_the_ramp() -> None:
    older = {"initial_effective_batch_size": 4, "target_effective_batch_size": 32, "batch_rampup_steps": 400}
    report, notes = shown({"train_batch_size": 32, "max_train_steps": 9, **older})
    assert (report.ramp.initial, report.ramp.target, report.ramp.unit) == (4, 32, 32)
    assert any("gh200_optimizations" in note for note in notes)
    assert any("no ramp from 4 to 32 is possible" in notice for notice in report.notices)


def test_missing_sizes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as refused:
        shown({"train_batch_size": "two", "gh200_optimizations": BLOCK})
    assert [problem.where for problem in refused.value.problems] == ["train_batch_size", "max_train_steps"]


def test_a_ramp_that_is_switched_off_is_shown_as_what_it_would_be() -> None:
    block = {**BLOCK, "enable_batch_size_rampup": False}
    config = {"train_batch_size": 1, "max_train_steps": 5, "gh200_optimizations": block}
    report, notes = shown(config, world=1)
    assert report.steps == 5
    assert "would give" in notes[0]


def test_what_is_wrong_with_the_datasets_is_no_matter_here() -> None:
    config = {"train_batch_size": 2, "max_train_steps": 20, "gh200_optimizations": BLOCK, "datasets": ["cats"]}
    report, _notes = shown(config)
    assert report.steps == 20


def test_everything_that_is_wrong_with_the_ramp_comes_at_once_and_only_once() -> None:
    block = {"batch_rampup_steps": "many", "ramp_curv": "linear"}
    with pytest.raises(ConfigError) as refused:
        shown({"train_batch_size": 2, "gh200_optimizations": block, "data_backend": "in_memory"})
    found = [problem.where for problem in refused.value.problems]
    assert sorted(found) == [
        "data_backend",
        "gh200_optimizations.batch_rampup_steps",
        "gh200_optimizations.initial_effective_batch_size",
        "gh200_optimizations.ramp_curv = 'linear'",
        "max_train_steps",
    ]
