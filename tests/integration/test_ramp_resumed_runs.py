"""Resuming in the ramp: after a kill, on other ranks, under other settings, without our file."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.ramp.schedule import GH200GradientRamp, RampState, resume
from simpletuner_gh200.upstream.checkpoints import newest_whole
from tests.integration.workbench import RANKS, probe, ramp

PROBE = probe("ramp")
STEPS = 7
RAMP = GH200GradientRamp(4, 16, 14, train_batch_size=2)


def configure(workbench: Any, **keys: Any) -> None:
    block = ramp(4, 16, 14, **keys)
    blocks = {"gh200_optimizations": block}
    workbench.configure(blocks=blocks, max_train_steps=STEPS, checkpoint_step_interval=2, checkpoints_total_limit=20)


def killed_after(workbench: Any, step: int) -> Path:
    """The project as a kill -9 after ``step`` leaves it; returns the latest checkpoint."""
    configure(workbench)
    run = workbench.known(probe=PROBE, env={"RAMP_PROBE": f"kill={step}"})
    assert run.exit_codes == [-9], run.explain()
    workbench.go_on_from(run)
    checkpoints = [path for path in workbench.project.output.glob("checkpoint-*") if not path.name.endswith("tmp")]
    return max(checkpoints, key=lambda path: int(path.name.split("-")[1]))


def half_written_by_two_ranks(whole: Path, folder: Path) -> None:
    """As kill -9 of the first of two ranks leaves what it was saving: the second one has written its file."""
    folder.mkdir()
    shutil.copy(whole / "training_state.json", folder)
    shutil.copy(whole / "random_states_0.pkl", folder / "random_states_1.pkl")


def windows(ramp: GH200GradientRamp, first: int) -> list[int]:
    return [ramp.accumulation(step) for step in range(first, STEPS)]


@pytest.mark.one_release("4.")  # the ramp's own state in a checkpoint; whole resumes run on both
def test_after_a_kill_the_same_windows_follow(workbench):
    checkpoint = killed_after(workbench, 5)
    assert checkpoint.name == "checkpoint-4"
    state = json.loads((checkpoint / "gh200_state.json").read_text())
    assert RampState.from_json(state["ramp"]) == RampState.after(RAMP, 4)
    if (checkpoint / "checkpoint_manifest.json").exists():
        assert "gh200_state.json" in (checkpoint / "checkpoint_manifest.json").read_text()
    half = checkpoint.with_name("checkpoint-6")
    half_written_by_two_ranks(checkpoint, half)
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    assert f"{half} is incomplete: it has no " in run.log() and "this run resumes from checkpoint-4" in run.log()
    aside = half.with_name("incomplete-checkpoint-6")
    assert sorted(path.name for path in aside.iterdir()) == ["random_states_1.pkl", "training_state.json"]
    assert newest_whole(half.parent) is not None and half.is_dir(), "written anew, and whole"
    assert run.summaries[0]["global_step"] == STEPS
    assert run.records[0]["windows"] == windows(RAMP, 4)
    assert [row["step"] for row in run.records[0]["logged"]] == list(range(5, STEPS + 1))
    assert "gh200: ramp:" not in run.log()


@pytest.mark.matrix
@pytest.mark.one_release("4.")
def test_other_ranks_and_missing_state_and_changed_settings_go_on_with_a_notice(workbench):
    saved = RampState.after(RAMP, 4)

    killed_after(workbench, 5)
    wider = workbench.train(probe=PROBE, world=2, env={"RAMP_PROBE": "unseen=1"})
    assert wider.ok, wider.explain()
    expected = resume(replace(RAMP, world_size=2), saved, 4).ramp
    for record in wider.records:
        assert record["windows"] == windows(expected, 4), "the ranks agree, whatever each of them sees on its disk"
    assert "world_size changed from 1 to 2 since the checkpoint" in wider.log()

    killed_after(workbench, 5)
    configure(workbench, target_effective_batch_size=8)
    changed = workbench.train(probe=PROBE)
    assert changed.ok, changed.explain()
    expected = resume(replace(RAMP, target=8), saved, 4).ramp
    assert changed.records[0]["windows"] == windows(expected, 4)
    assert "target changed from 16 to 8 since the checkpoint" in changed.log()

    checkpoint = killed_after(workbench, 5)
    (checkpoint / "gh200_state.json").unlink()
    bare = workbench.train(probe=PROBE)
    assert bare.ok, bare.explain()
    assert bare.records[0]["windows"] == windows(RAMP, 4)
    assert "the checkpoint has no ramp state" in bare.log()


@pytest.mark.parametrize("world", RANKS)
def test_a_signal_gets_its_checkpoint_at_the_end_of_the_window_and_the_next_start_goes_on(workbench, world):
    """The signal reaches one rank, in mid-window; all of them write, and end with 75."""
    configure(workbench)
    ramp = replace(RAMP, world_size=world)
    signalled = workbench.train(world=world, probe=probe("preempted"))
    assert signalled.exit_codes == [75] * world, signalled.explain()
    consumed = [len(losses) for losses in signalled.losses]
    step = signalled.summaries[0]["global_step"]
    assert consumed == [sum(ramp.accumulation(each) for each in range(step))] * world, "a window was cut short"
    assert {summary["status"] for summary in signalled.summaries} == {"interrupted"}
    newest = newest_whole(workbench.project.output)
    assert newest is not None
    assert newest.name == f"checkpoint-{step}"
    resumed = workbench.train(world=world, probe=PROBE)
    assert resumed.ok, resumed.explain()
    for record in resumed.records:
        assert record["windows"] == windows(ramp, step)
