"""Where a run goes on, and that nothing half-written is in SimpleTuner's way."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.seams.checkpoints import move_aside, resume_from_whole, resumption
from tests.unit.nobody import as_nobody
from tests.unit.upstream.test_upstream_checkpoints import write


@pytest.fixture
def output(tmp_path) -> Path:
    """A whole checkpoint, and two newer ones that were being written."""
    write(tmp_path / "checkpoint-2", guarded=True)
    for step in (4, 10):
        (write(tmp_path / f"checkpoint-{step}", guarded=True) / "random_states_0.pkl").unlink()
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_goes_on_from_the_last_whole_one(output):
    before = names(output)
    found = resumption("latest", output)
    assert found.start == "checkpoint-2"
    notice = str(found.notice())
    assert "checkpoint-10 is incomplete: it has no random_states_0.pkl" in notice and "checkpoint-4 is" in notice
    assert "kept aside as incomplete-checkpoint-10, incomplete-checkpoint-4; this run resumes from" in notice
    assert names(output) == before, "deciding changes nothing"


def test_without_a_whole_one_the_run_starts_anew(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-4-tmp").mkdir()
    found = resumption("latest", tmp_path)
    assert found.start == ""
    assert "starts from the beginning" in str(found.notice())


def test_whole_ones_are_left_to_simpletuner(tmp_path):
    assert resumption("latest", tmp_path / "new").notice() is None
    write(tmp_path / "checkpoint-2", guarded=True)
    write(tmp_path / "checkpoint-4", guarded=True)
    for asked in ("latest", "checkpoint-2", "/elsewhere/checkpoint-4/", "s3://bucket/checkpoint-4"):
        found = resumption(asked, tmp_path)
        assert (found.start, found.notice()) == (asked, None)


def test_a_named_one_that_is_not_whole_is_refused(output):
    with pytest.raises(UsageError, match="checkpoint-10 is incomplete") as refused:
        resumption("checkpoint-10", output)
    assert refused.value.remedy == "resume from checkpoint-2, the last whole one"
    (output / "checkpoint-2" / ".guard").unlink()
    (output / "checkpoint-2" / "checkpoint_manifest.json").unlink()
    assert resumption("s3://bucket/checkpoint-10", output).start == "s3://bucket/checkpoint-10"


class Accelerator:
    num_processes = 1
    is_main_process = True


@pytest.fixture
def resume():
    """What is resumed from, after what was requested; and the failures of the run."""
    failures: list[BaseException] = []
    runtime: Any = SimpleNamespace(outcome=SimpleNamespace(fail=failures.append))

    def call(output: Path, asked: str | None) -> Any:
        config = SimpleNamespace(output_dir=str(output), resume_from_checkpoint=asked)
        resume_from_whole(SimpleNamespace(config=config, accelerator=SimpleNamespace(num_processes=1)), runtime)
        return config.resume_from_checkpoint

    call.failures = failures  # type: ignore[attr-defined]
    return call


def test_what_is_not_whole_is_kept_aside_before_simpletuner_looks(output, resume, caplog):
    contents = names(output / "checkpoint-10")
    with caplog.at_level(logging.WARNING, "simpletuner_gh200"):
        assert resume(output, "latest") == "checkpoint-2"
    assert names(output) == ["checkpoint-2", "incomplete-checkpoint-10", "incomplete-checkpoint-4"]
    assert names(output / "incomplete-checkpoint-10") == contents
    assert "checkpoint-10 is incomplete" in caplog.text and "this run resumes from checkpoint-2" in caplog.text
    assert resume(output, "latest") == "latest", "the next start finds nothing to put right"


def test_it_is_out_of_the_way_of_a_run_from_a_named_one_too(output, resume):
    """Which will write its own checkpoint there: no file of the old one may stay among the new."""
    assert resume(output, "checkpoint-2") == "checkpoint-2"
    assert names(output) == ["checkpoint-2", "incomplete-checkpoint-10", "incomplete-checkpoint-4"]


def test_a_run_without_a_whole_one_is_told_to_start_anew(tmp_path, resume):
    (tmp_path / "checkpoint-3").mkdir()
    assert resume(tmp_path, "latest") is None
    assert names(tmp_path) == ["incomplete-checkpoint-3"]


def test_who_resumes_from_nothing_keeps_everything(output, resume):
    before = names(output)
    assert resume(output, None) is None
    assert names(output) == before


def test_a_refusal_is_the_end_of_the_run_and_its_reason(output, resume):
    with pytest.raises(UsageError):
        resume(output, "checkpoint-10")
    assert "checkpoint-10 is incomplete" in str(resume.failures)


def test_a_second_one_of_a_step_does_not_replace_the_first(tmp_path):
    for expected in ("incomplete-checkpoint-3", "incomplete-checkpoint-3-1", "incomplete-checkpoint-3-2"):
        (tmp_path / "checkpoint-3").mkdir()
        assert move_aside(tmp_path / "checkpoint-3").name == expected


def test_one_that_can_not_be_moved_stops_the_run(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()

    def work() -> None:
        with pytest.raises(RunFailed, match="can't be renamed to incomplete-checkpoint-3"):
            move_aside(tmp_path / "checkpoint-3")

    assert as_nobody(work, tmp_path) == 0
