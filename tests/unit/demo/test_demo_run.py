"""The demo around a stand-in for training: who sees its output, and what it says when steps are missing."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from simpletuner_gh200.demo import run
from simpletuner_gh200.demo.run import progress_in, summary_lines
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
            f'mkdir -p {folder}/output/checkpoint-4; cp {tmp_path}/summary.json "${run.SUMMARY_FOLDER}/rank-0.json"\n'
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


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("[INFO] Loading data backend config from x.json", ("filling datasets and caches", None)),
        ("[INFO] Loading diffusion model from model", ("loading the model", None)),
        ("Epoch 1/3, Steps:  25%|##5  | 6/24 [00:09<00:23,  3.9s/it, lr=0.001]", ("training", 6)),
        ("Epoch 1/3 Steps: 0%| | 0/8 [00:00<?] Epoch 1/3, Steps: 12%|#| 1/8 [00:09<01:04]", ("training", 1)),
        ("Loading captions:   0%|   | 0/24 [00:00<?, ?it/s]", (None, None)),
    ],
)
def test_the_log_says_how_far_training_is(line: str, progress: tuple[str | None, int | None]) -> None:
    assert progress_in(line) == progress
