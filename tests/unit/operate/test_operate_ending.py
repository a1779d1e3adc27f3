"""The last line of a run: what happened, what is kept, how to go on."""

from __future__ import annotations

import pytest

from simpletuner_gh200.operate.ending import closing_line
from simpletuner_gh200.operate.outcome import Outcome
from tests.unit.upstream.test_upstream_checkpoints import write

AGAIN = "gh200 train --config mine.json"


def line(ended, output=None, *, resumes=False):
    return closing_line(ended, output=output, again=AGAIN, resumes=resumes)


def summary(status, **more):
    return {"status": status, "reason": None, "global_step": 12, "max_train_steps": 40, **more}


def test_a_completed_run_is_closed_by_others():
    assert line(Outcome(0, [summary("completed")])) is None


@pytest.mark.parametrize("phase", ["starting", "caching", "filling the caches", "loading the model"])
def test_an_interrupt_before_training_loses_nothing(phase):
    said = line(Outcome(130, [], 2, phase))
    assert said == f"interrupted while {phase}; nothing lost; resume with: {AGAIN}"
    assert line(Outcome(130, [], 2, None)).startswith("interrupted while starting")


def test_an_interrupt_in_training_names_step_checkpoint_and_command(tmp_path):
    ended = Outcome(130, [summary("interrupted")], 2, "training")
    assert line(ended, tmp_path) == (
        f"interrupted while training at step 12 of 40; there is no checkpoint yet; resume with: {AGAIN}"
    )
    checkpoint = write(tmp_path / "checkpoint-10", guarded=True)
    (tmp_path / "checkpoint-12").mkdir()
    assert line(ended, tmp_path) == (
        f"interrupted while training at step 12 of 40; the last checkpoint is {checkpoint}; "
        f"resume with: {AGAIN} --resume_from_checkpoint=latest"
    )
    assert line(ended, tmp_path, resumes=True).endswith(AGAIN)


def test_an_interrupt_after_training_says_that_it_had_completed():
    said = line(Outcome(130, [summary("completed")], 2, "writing packs for the next start"))
    assert (
        said == "interrupted while writing packs for the next start; training had completed and nothing of it is lost"
    )


def test_the_word_failed_is_for_failures_with_the_cause_at_the_end():
    reason = "RuntimeError: PytorchStreamWriter failed\n  cause: the disk of /data is full (0 B left)"
    said = line(Outcome(1, [summary("completed"), summary("failed", reason=reason)]))
    assert said.startswith("training failed: RuntimeError")
    assert said.splitlines()[-1] == "  cause: the disk of /data is full (0 B left)"
    assert "failed" not in str(line(Outcome(130, [], 2, "training")))


def test_a_checkpoint_that_failed_is_no_interrupt():
    ended = Outcome(1, [summary("interrupted"), summary("failed", reason="OSError: disk full")], 10, "training")
    assert line(ended) == "training failed: OSError: disk full"


def test_a_rank_that_says_nothing_is_a_failure_with_a_hint():
    assert "ended without a word while training (killed" in line(Outcome(137, [], None, "training"))


def test_a_reason_of_many_lines_hangs_below_its_first():
    """torch's, for a damaged file, ends with advice that has nothing to do with the run."""
    reason = "UnpicklingError: Weights only load failed.\nDo it only\n\nCheck the documentation\n"
    assert line(Outcome(1, [summary("failed", reason=reason)])).splitlines() == [
        "training failed: UnpicklingError: Weights only load failed.",
        "  Do it only",
        "  Check the documentation",
    ]
