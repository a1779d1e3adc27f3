"""Telemetry of real runs: a record per optimizer step, in the file, the trackers and the status events."""

from __future__ import annotations

import stat

import pytest

from simpletuner_gh200.telemetry.reading import read_run
from tests.integration.workbench import probe, ramp

RAMP = {"gh200_optimizations": ramp(2, 4, 4)}
PROBE = probe("trackers")


def test_every_optimizer_step_is_recorded(workbench):
    secret = "hf_" + "Qx7" * 11
    named = {"hub_model_id": "a", "tracker_run_name": secret}
    workbench.configure(blocks=RAMP, max_train_steps=5, checkpoint_step_interval=2, **named)
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    path = run.output / "gh200" / "telemetry.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    recorded = read_run(run.output)
    assert [record["step"] for record in recorded.steps] == [1, 2, 3, 4, 5]
    assert recorded.start["features"]["telemetry"] == "on"
    assert recorded.end["status"] == "completed"
    saved = [record["step"] for record in recorded.steps if record["save_seconds"] > 0]
    assert saved == [2, 4], "a checkpoint's time is neither computing nor waiting"
    seconds = recorded.end["seconds"]
    assert seconds["save"] > 0 and seconds["finish"] > 0
    assert sum(record["save_seconds"] for record in recorded.steps) == pytest.approx(seconds["save"])
    for record in recorded.steps:
        assert record["loss"] is not None
        assert 0 < record["data_wait_seconds"] < record["step_seconds"]
        assert 0 < record["compute_seconds"] < record["step_seconds"]
        assert record["host"]["available"] > 0
        assert record["effective_batch"] == 2 * record["micro_batches"]
    assert recorded.steps[-1]["effective_batch"] == 4
    seen = run.records[0]
    assert seen["logged"] == [record["step"] for record in recorded.steps]
    assert {"gh200/step_seconds", "gh200/data_wait_seconds", "gh200/host/available"} <= set(seen["logged_names"])


def test_nothing_is_recorded_where_nothing_of_ours_is_on(workbench):
    run = workbench.known()
    assert run.ok, run.explain()
    assert not (run.output / "gh200").exists()


@pytest.mark.one_release("3.")
def test_it_can_be_asked_for_without_any_block_and_changes_no_number(workbench):
    plain = workbench.known()
    run = workbench.train(env={"SIMPLETUNER_GH200_TELEMETRY": "1"})
    assert run.ok, run.explain()
    assert run.losses == plain.losses
    assert len(read_run(run.output).steps) == 8


@pytest.mark.one_release("4.")
def test_telemetry_that_breaks_leaves_training_alone(workbench):
    """A file stands where the folder has to be, and a feature's numbers raise."""
    workbench.configure(max_train_steps=2)
    workbench.project.output.mkdir()
    (workbench.project.output / "gh200").write_text("in the way")
    run = workbench.train(env={"SIMPLETUNER_GH200_TELEMETRY": "1"})
    assert run.ok, run.explain()
    assert run.log().count("telemetry can't be written") == 1
    assert run.summaries[0]["details"]["telemetry"]["dropped"] > 0
