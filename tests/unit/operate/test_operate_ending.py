"""What `gh200 train` says when training has ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.operate import launching, planned, preflight
from simpletuner_gh200.operate.ending import FEATURE_LINES, Outcome, closing_line, closing_lines
from simpletuner_gh200.upstream.checkpoints import GUARD, MANIFEST
from tests.unit.upstream.test_upstream_checkpoints import write


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    output = tmp_path / "out put"
    for step in (2, 10, 9):
        (output / f"checkpoint-{step}").mkdir(parents=True)
        (output / f"checkpoint-{step}" / GUARD).touch()  # a whole one, by its own word
        (output / f"checkpoint-{step}" / MANIFEST).write_text(json.dumps({"files": [GUARD]}))
    (output / "checkpoint-12.tmp").mkdir()
    (output / "pytorch_lora_weights.safetensors").touch()
    return {
        "status": "completed",
        "reason": None,
        "global_step": 10,
        "max_train_steps": 10,
        "output_dir": str(output),
        "seconds": {"import": 12.0, "configure": 0.01, "models": 1.0, "data": 4.0, "model load": 2.0, "train": 70.0}
        | {"save": 12.0, "finish": 3.0},
        "features": {"ramp": "on", "prefetch": "off: not asked for", "caches": "off: seam collate.fn: gone"},
        "details": {
            "telemetry": {"file": "x.jsonl"},
            "store": {
                "cats": {"files": 4, "bytes": 4096, "held_bytes": 2048, "served": 7, "elsewhere": 1}
                | {"elsewhere_in_training": 0}
            },
            "caches": {
                "vae-cats": {"hits": 30, "misses": 2, "misses_in_training": 1, "entries": 4, "bytes": 1024},
                "text": {"hits": 0, "misses": 0, "entries": 0, "bytes": 0},
            },
            "ramp": {"changes": [{"step": 0, "effective": 2}, {"step": 9, "effective": 8}], "samples": 70},
        },
    }


def test_everything_a_person_wants_next(summary: dict[str, Any]) -> None:
    output = summary["output_dir"]
    assert closing_lines(summary) == [
        ("trained", "10 of 10 optimizer steps"),
        (
            "time",
            "importing SimpleTuner 12.0 s, loading 3.0 s, datasets and caches 4.0 s, training 1 min 10 s, "
            "checkpoints 12.0 s, final weights 3.0 s",
        ),
        (
            "in-memory dataset",
            "cats: 4 files, 4 KiB of files in 2 KiB of memory; 7 reads from memory, 1 from disk, "
            "0 of them during training",
        ),
        (
            "unified cache",
            "vae-cats: 30 of 32 reads served without opening a file, 1 file opened during training; 4 entries, 1 KiB",
        ),
        ("unified cache", "text: nothing was read from it; 0 entries, 0 B"),
        ("batch ramp", "effective batch 2 (step 0) → 8 (step 9); 70 samples"),
        ("feature", "caches is off: seam collate.fn: gone"),
        ("weights", f"{output}/pytorch_lora_weights.safetensors"),
        ("last checkpoint", f"{output}/checkpoint-10"),
        ("report", f"gh200 report '{output}'"),
    ]


def test_a_run_that_never_began_to_train_has_nothing_to_close_with() -> None:
    assert closing_lines({"status": "failed", "output_dir": None, "seconds": {"import": 9.0}}) == []


def test_nothing_is_named_that_is_not_there(tmp_path: Path) -> None:
    assert closing_lines({"output_dir": str(tmp_path), "global_step": 3}) == [("trained", "3 optimizer steps")]


def test_train_closes_with_it(summary: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gh200) -> None:
    """The preflight and the launch are the real ones; what is launched only leaves a summary, as a rank does."""
    leave = (
        "import json, os, sys; from simpletuner_gh200.seams.lifeline import Lifeline;"
        "Lifeline.from_environment(os.environ).tell(summary=json.loads(sys.argv[1]))"
    )
    command = launching.LaunchCommand((sys.executable, "-c", leave, json.dumps(summary)), {})
    monkeypatch.setattr(preflight, "launch_command", lambda *_words, **_more: command)
    (tmp_path / "config.json").write_text("{}")
    code, _out, shown = gh200("train", "--config", tmp_path / "config.json")
    assert code == 0, shown
    for line in ("gh200: weights: ", "gh200: last checkpoint: ", "gh200: time: ", "gh200: report: gh200 report"):
        assert line in shown


def test_activations_are_told_where_some_were_moved(tmp_path: Path) -> None:
    def lines(**moved: int) -> list[tuple[str, str]]:
        return closing_lines({"output_dir": str(tmp_path), "details": {"activations": moved}})[1:]

    words = "1 MiB to CPU memory and back for 3 MiB of 1200 saved tensors"
    assert lines(tensors=1200, saved=3 << 20, moved=1 << 20) == [("activations", words)]
    assert lines(tensors=0, saved=0, moved=0) == []


def test_weights_and_gradients_are_told_where_some_live_in_grace(tmp_path: Path) -> None:
    details = {
        "weights": {"blocks": 3, "bytes": 3 << 20, "streamed": 7 << 20},
        "gradients": {"tensors": 40, "bytes": 2 << 20},
    }
    found = closing_lines({"output_dir": str(tmp_path), "details": details})[1:]
    assert found == [
        ("blocks", "3 MiB of 3 blocks in Grace; 7 MiB copied ahead of use"),
        ("gradients", "2 MiB of 40 tensors in Grace"),
    ]
    details = {"weights": {"blocks": 0, "bytes": 0, "streamed": 0}, "gradients": {"tensors": 0, "bytes": 0}}
    assert closing_lines({"output_dir": str(tmp_path), "details": details})[1:] == []


def test_a_dataset_that_did_not_arrive_and_one_that_is_held_for_another_entry(tmp_path: Path) -> None:
    held = {"files": 1, "held_bytes": 2048, "served": 7, "elsewhere": 1}
    details = {"store": {"late": {**held, "arrived": False}, "again": held}}
    assert closing_lines({"output_dir": str(tmp_path), "details": details})[1:] == [
        (
            "in-memory dataset",
            "late: 1 file, 2 KiB of memory (not all of it had arrived); 7 reads from memory, 1 from disk",
        ),
        ("in-memory dataset", "again: 1 file, 2 KiB of memory; 7 reads from memory, 1 from disk"),
    ]


@pytest.mark.parametrize("code", [0, 75])
def test_nothing_that_is_said_afterwards_changes_the_exit_code(
    code: int, summary: dict[str, Any], tmp_path: Path, monkeypatch, caplog, gh200
) -> None:
    def broken(*_words: object) -> None:
        raise KeyError("bytes")

    del summary["details"]["caches"]["text"]["entries"]
    monkeypatch.setattr(launching, "run", lambda *_words, **_more: Outcome(code, [summary]))
    monkeypatch.setattr(planned, "learn", broken)
    (tmp_path / "config.json").write_text("{}")
    assert gh200("train", "--config", tmp_path / "config.json")[0] == code
    assert "what the run did can't be shown: KeyError: 'entries'" in caplog.text
    assert "what the plan can learn from the run can't be shown: KeyError: 'bytes'" in caplog.text


# -- runs that did not complete ---------------------------------------------------------------------------

AGAIN = "gh200 train --config mine.json"


def line(ended, output=None, *, resumes=False):
    return closing_line(ended, output=output, again=AGAIN, resumes=resumes)


def ended_as(status, **more):
    return {"status": status, "reason": None, "global_step": 12, "max_train_steps": 40, **more}


def test_a_completed_run_is_closed_by_others():
    assert line(Outcome(0, [ended_as("completed")])) is None


@pytest.mark.parametrize("phase", ["starting", "caching", "filling the caches", "loading the model"])
def test_an_interrupt_before_training_loses_nothing(phase):
    said = line(Outcome(130, [], 2, phase))
    assert said == f"interrupted while {phase}; nothing lost; start again with: {AGAIN}"
    assert line(Outcome(130, [], 2, None)).startswith("interrupted while starting")


def test_what_time_was_too_short_to_write_is_named_with_the_last_one_on_disk(tmp_path):
    checkpoint = write(tmp_path / "checkpoint-10", guarded=True)
    told = {"checkpoints": {"pending": str(tmp_path / "checkpoint-12")}}
    ended = Outcome(75, [ended_as("interrupted", exit_code=75, details=told)], 10, "training")
    assert "checkpoint-12 is not on disk yet; the last checkpoint is " + str(checkpoint) in line(ended, tmp_path)
    write(tmp_path / "checkpoint-12", guarded=True)
    assert "not on disk" not in line(ended, tmp_path), "the launcher has waited for it"


@pytest.mark.parametrize(
    ("safe", "last"),
    [("/out/checkpoint-6", "the last one safe on disk is checkpoint-6"), (None, "none was safe on disk")],
)
def test_checkpoints_behind_are_told_with_what_they_cost_and_what_is_safe(safe, last):
    found = {"behind": 2, "stall_s": 1.5, "waited_s": 0.5, "drain_s": 8.0, "safe": safe, "pending": None}
    ((label, said),) = FEATURE_LINES["checkpoints"](found)
    assert label == "checkpoints"
    assert said.startswith(
        "2 saved to memory: training lost 1.5 s, 500 ms of it waiting for the disk; written to disk in 8.0 s"
    )
    assert last in said
    assert list(FEATURE_LINES["checkpoints"]({**found, "behind": 0})) == []


def test_an_interrupt_in_training_names_step_checkpoint_and_command(tmp_path):
    ended = Outcome(130, [ended_as("interrupted")], 2, "training")
    assert line(ended, tmp_path) == (
        f"interrupted while training at step 12 of 40; there is no checkpoint yet; start again with: {AGAIN}"
    )
    checkpoint = write(tmp_path / "checkpoint-10", guarded=True)
    (tmp_path / "checkpoint-12").mkdir()
    assert line(ended, tmp_path) == (
        f"interrupted while training at step 12 of 40; the last checkpoint is {checkpoint}; "
        f"resume with: {AGAIN} --resume_from_checkpoint=latest"
    )
    assert line(ended, tmp_path, resumes=True).endswith(AGAIN)


def test_an_interrupt_after_training_says_that_it_had_completed():
    said = line(Outcome(130, [ended_as("completed")], 2, "writing packs for the next start"))
    assert (
        said == "interrupted while writing packs for the next start; training had completed and nothing of it is lost"
    )


def test_the_word_failed_is_for_failures_with_the_cause_at_the_end():
    reason = "RuntimeError: PytorchStreamWriter failed\n  cause: the disk of /data is full (0 B left)"
    said = line(Outcome(1, [ended_as("completed"), ended_as("failed", reason=reason)]))
    assert said.startswith("training failed: RuntimeError")
    assert said.splitlines()[-1] == "  cause: the disk of /data is full (0 B left)"
    assert "failed" not in str(line(Outcome(130, [], 2, "training")))


def test_a_checkpoint_that_failed_is_no_interrupt():
    ended = Outcome(1, [ended_as("interrupted"), ended_as("failed", reason="OSError: disk full")], 10, "training")
    assert line(ended) == "training failed: OSError: disk full"


def test_a_rank_that_says_nothing_is_a_failure_with_a_hint():
    assert "exited without reporting why while training (killed" in line(Outcome(137, [], None, "training"))


def test_a_reason_of_many_lines_hangs_below_its_first():
    """torch's, for a damaged file, ends with advice that has nothing to do with the run."""
    reason = "UnpicklingError: Weights only load failed.\nDo it only\n\nCheck the documentation\n"
    assert line(Outcome(1, [ended_as("failed", reason=reason)])).splitlines() == [
        "training failed: UnpicklingError: Weights only load failed.",
        "  Do it only",
        "  Check the documentation",
    ]
