"""The demo around a stand-in for training: where its output goes, and what it says when steps are missing."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from simpletuner_gh200.demo import run
from simpletuner_gh200.demo.run import summary_lines
from simpletuner_gh200.errors import RunFailed


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``run_demo`` where the interpreter is a script that says two lines and leaves the given summary."""
    folder = tmp_path / "demo"
    monkeypatch.setattr(run, "write_project_in_subprocess", lambda *_: None)

    def start(reached: int):
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
            f'mkdir -p {folder}/output/checkpoint-4; cp {tmp_path}/summary.json "${run.SUMMARY_FOLDER}/rank-0.json"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))
        return run.run_demo(folder, steps=4)

    return start


def test_what_training_says_goes_to_the_log_alone(trained, capfd) -> None:
    result = trained(4)
    assert (result.project.folder / run.LOG).read_text() == "first\nsecond\n"
    assert capfd.readouterr() == ("", "")


def test_the_times_of_the_parts_are_the_time_of_all(trained) -> None:
    *parts, total = trained(4).seconds.values()
    assert sum(parts) == pytest.approx(total)


def test_steps_that_are_missing_are_a_failure_that_names_the_log(trained) -> None:
    with pytest.raises(RunFailed, match=r"step 2 of 4") as failed:
        trained(2)
    assert run.LOG in str(failed.value)


# -- what people see -------------------------------------------------------------------------------------------------

RESULT = {
    "simpletuner": "4.10.1",
    "python": "3.13.0",
    "torch": "2.14.1",
    "seconds": {"prepare": 20.0, "train": 2.5},
    "seams": {
        "trainer.train": "ok",
        "trainer.init_hooks": "off: changed",
        "web_ui.page": "off: its module was not imported",
    },
}
SUMMARY = {"output_dir": "/somewhere/output", "global_step": 24, "max_train_steps": 24, "seconds": {"train": 2.5}}


def test_people_see_what_ran_and_where_the_time_went_and_no_seam_that_is_in_place() -> None:
    lines = summary_lines(RESULT, SUMMARY)
    said = dict(lines)
    assert "SimpleTuner 4.10.1, torch 2.14.1, Python 3.13.0" in said["ran"]
    assert said["trained"] == "24 of 24 optimizer steps"
    assert said["time"] == "making the project 20.0 s, training 2.5 s"
    assert [label for label, _text in lines].count("seam") == 1
    assert said["seam"] == "trainer.init_hooks is off: changed"
    assert "trainer.train" not in str(lines)
