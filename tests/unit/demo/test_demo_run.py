"""The demo around a stand-in for training: who sees its output, and what it says when steps are missing."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from simpletuner_gh200.demo import run
from simpletuner_gh200.errors import RunFailed


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``run_demo`` where the interpreter is a script that says two lines and leaves the given summary."""
    folder = tmp_path / "demo"
    monkeypatch.setattr(run, "write_project_in_subprocess", lambda *_: None)

    def start(reached: int, **options):
        summary = {
            "status": "completed",
            "reason": "",
            "global_step": reached,
            "details": {},
            "seconds": {"train": 1.5},
        }
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        script = tmp_path / "python"
        script.write_text(
            "#!/bin/sh\necho first; echo second >&2\n"
            f'mkdir -p {folder}/output/checkpoint-4; cp {tmp_path}/summary.json "${run.KEEP_SUMMARY}/rank-0.json"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))
        return run.run_demo(folder, steps=4, **options)

    return start


def test_lines_go_to_whoever_watches_and_to_the_log(trained, capfd) -> None:
    seen: list[str] = []
    result = trained(4, show=seen.append)
    assert seen == ["first\n", "second\n"]
    assert (result.project.folder / run.LOG).read_text() == "first\nsecond\n"
    assert result.seconds["train"] == 1.5
    assert capfd.readouterr() == ("", "")


def test_without_a_watcher_there_is_the_log(trained, capfd) -> None:
    result = trained(4)
    assert (result.project.folder / run.LOG).read_text() == "first\nsecond\n"
    assert capfd.readouterr() == ("", "")


def test_steps_that_are_missing_are_a_failure_that_names_the_log(trained) -> None:
    with pytest.raises(RunFailed, match=r"step 2 of 4") as failed:
        trained(2)
    assert run.LOG in str(failed.value)
