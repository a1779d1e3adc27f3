"""Set-ups in which the ramp can't keep its promise are refused with a remedy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.errors import FeatureUnavailable, GH200Error, RunFailed
from simpletuner_gh200.ramp.schedule import GH200GradientRamp
from simpletuner_gh200.seams.features.ramp.feature import RampFeature, refuse_impossible

PLAIN = SimpleNamespace(distributed_type="DistributedType.MULTI_GPU", state=SimpleNamespace(deepspeed_plugin=None))


def test_an_ordinary_run_is_accepted() -> None:
    config = SimpleNamespace(max_train_steps=10, ramtorch=False)
    assert refuse_impossible(config, PLAIN) is None


@pytest.mark.parametrize(
    ("config", "accelerator", "kind", "named"),
    [
        ({"use_deepspeed_optimizer": True}, PLAIN, FeatureUnavailable, "DeepSpeed"),
        ({}, SimpleNamespace(distributed_type="DistributedType.DEEPSPEED"), FeatureUnavailable, "DeepSpeed"),
        ({}, SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=object())), FeatureUnavailable, "DeepSpeed"),
        ({"ramtorch": True}, PLAIN, FeatureUnavailable, "ramtorch"),
        ({"optimizer_release_gradients": True}, PLAIN, FeatureUnavailable, "optimizer_release_gradients"),
    ],
)
def test_impossible_runs_are_refused(
    config: dict[str, Any], accelerator: Any, kind: type[GH200Error], named: str
) -> None:
    with pytest.raises(kind, match=named) as refused:
        refuse_impossible(SimpleNamespace(**{"max_train_steps": 10, **config}), accelerator)
    assert refused.value.exit_code == 2


RAMP = GH200GradientRamp(initial=2, target=16, ramp_steps=40, train_batch_size=1, world_size=2)


@pytest.mark.parametrize("batch", [1, 16])
def test_a_ramp_that_never_changes_is_not_called_enabled(caplog: pytest.LogCaptureFixture, batch: int) -> None:
    """The guides' quick configuration: whoever looks for their line in the log must not find it."""
    feature = RampFeature()
    feature._ramp = replace(RAMP, train_batch_size=batch)
    with caplog.at_level("INFO", logger="simpletuner_gh200"):
        feature._announce(["no ramp is possible"])
    assert ("ramp enabled" in caplog.text) == (batch == 1)
    assert "no ramp is possible" in caplog.text


@pytest.mark.parametrize(
    ("main_goes_on_with", "agreed"),
    [((RAMP, 4), True), ((RAMP, 3), False), ((replace(RAMP, target=8), 4), False)],
    ids=["the same", "another step", "another schedule"],
)
def test_ranks_that_would_resume_differently_stop(
    monkeypatch: pytest.MonkeyPatch, main_goes_on_with: tuple[GH200GradientRamp, int], agreed: bool
) -> None:
    """Node-local output folders with different checkpoints, say: windows of different lengths never end."""

    def told(values: list[Any]) -> None:
        values[:] = [main_goes_on_with, None]

    monkeypatch.setattr("accelerate.utils.broadcast_object_list", told)
    feature, begun = RampFeature(), []
    feature._ramp = RAMP
    monkeypatch.setattr(feature, "_hook_loop", begun.append)
    accelerator = SimpleNamespace(num_processes=2, is_main_process=False)
    trainer = SimpleNamespace(accelerator=accelerator, state={"global_step": 4}, config=SimpleNamespace())
    if agreed:
        feature.before_train(trainer)
    else:
        with pytest.raises(RunFailed, match="this rank would go on from step 4"):
            feature.before_train(trainer)
    assert begun == ([trainer] if agreed else [])


def test_a_ramp_tells_how_many_samples_the_rest_of_the_run_takes() -> None:
    feature = RampFeature()
    feature.runtime = SimpleNamespace(trainer=SimpleNamespace(config=SimpleNamespace(max_train_steps=6)))
    feature._ramp, feature._last = RAMP, None
    assert feature.telemetry() == {}, "no window has begun"
    for step in (0, 3, 5):
        feature._opened(RAMP.window(step))
        assert feature.telemetry() == {"samples_left": sum(RAMP.window(n).effective for n in range(step + 1, 6))}
