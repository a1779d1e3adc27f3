"""``--json``: one object on the last line of standard output and nothing else there, whatever the run itself prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.operate import launching
from simpletuner_gh200.operate.ending import Outcome
from simpletuner_gh200.telemetry.sink import JsonLines

pytestmark = pytest.mark.usefixtures("few_options")


def asked(*words: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(build_app(), list(words))
    assert getattr(done.exception, "exit_code", done.exit_code) == code, done.output
    (line,) = done.stdout.splitlines()
    return json.loads(line)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.png").write_bytes(b"not looked at")
    (folder / "a.txt").write_text("a cat")
    return folder


@pytest.fixture
def project(images: Path, tmp_path: Path) -> Path:
    return Path(
        asked("init", str(tmp_path / "run"), "--data", str(images), "--cpu", "--model", "flux", "--json")["config"]
    )


def test_init(images: Path, tmp_path: Path) -> None:
    made = asked("init", str(tmp_path / "run"), "--data", str(images), "--cpu", "--model", "flux", "--json")
    size = sum(path.stat().st_size for path in images.iterdir())
    assert made["found"] == {"images": 2, "captioned": 1, "bytes": size}
    assert all(Path(path).is_file() for path in made["written"])
    assert made["config"] in made["written"]
    assert made["trains"] == {"what": "lora", "ranks": 1, "sharded": False}
    assert all(decision["what"] and decision["why"] for decision in made["decisions"])


def test_init_of_all_weights(images: Path, tmp_path: Path) -> None:
    words = ("--data", str(images), "--full", "--nodes", "2", "--gpus-per-node", "4", "--json")
    made = asked("init", str(tmp_path / "run"), *words)
    assert made["trains"] == {"what": "all weights", "ranks": 8, "sharded": True}
    assert json.loads(Path(made["config"]).read_text())["model_type"] == "full"


def test_report(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "run" / "gh200" / "telemetry.jsonl")
    sink.write({"kind": "start", "time": 1.0, "step": 0, "max_steps": 1})
    sink.write({"kind": "step", "step": 1, "loss": 0.5, "step_seconds": 1.0})
    made = asked("report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html"), "--json")
    assert made["report"] == str(tmp_path / "page.html")
    assert Path(made["report"]).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


CHILD = 'import sys, os; print("loud"); sys.stdout.flush(); os.system("echo louder"); sys.exit({code})'


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In place of a training run: a process that prints, whose processes print, and that ends as it is told."""

    def run(code: int, summary: dict[str, Any]) -> None:
        def instead(*_planned: Any, **_options: Any) -> Outcome:
            done = subprocess.run([sys.executable, "-c", CHILD.format(code=code)], check=False)
            return Outcome(done.returncode, [summary])

        monkeypatch.setattr(launching, "run", instead)

    return run


@pytest.mark.parametrize(("code", "status"), [(0, "completed"), (1, "failed")])
def test_train(
    project: Path, loud: Any, capfd: pytest.CaptureFixture[str], code: int, status: str, monkeypatch: Any
) -> None:
    from simpletuner_gh200.cli.main import main

    output = project.parents[1] / "output"
    output.mkdir()
    (output / "pytorch_lora_weights.safetensors").write_bytes(b"x")
    details = {"telemetry": {"file": "telemetry.jsonl"}}
    loud(
        code,
        {
            "status": status,
            "reason": "why",
            "global_step": 3,
            "max_train_steps": 9,
            "seconds": {"train": 1.5},
            "features": {"ramp": "on"},
            "details": details,
            "output_dir": str(output),
        },
    )
    words = ["gh200", "train", "--config", str(project), "--pretrained_model_name_or_path=x/y", "--no-plan", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capfd.readouterr()
    (line,) = shown.out.splitlines()
    told = json.loads(line)
    assert ended.value.code == code == told["exit_code"]
    assert (told["ok"], told["status"], told["global_step"]) == (code == 0, status, 3)
    assert told["weights"] == str(output / "pytorch_lora_weights.safetensors")
    assert told["seconds"] == {"train": 1.5}
    assert "loud" in shown.err and "louder" in shown.err
    assert os.fstat(1)  # and standard output is there again


@pytest.mark.parametrize(("code", "ends", "again"), [(75, 0, True), (1, 1, False), (0, 0, False)])
def test_a_run_that_wants_to_go_on_says_so_through_the_file_it_was_given(
    project: Path, loud: Any, tmp_path: Path, code: int, ends: int, again: bool
) -> None:
    loud(code, {"status": "interrupted", "reason": "why", "exit_code": code})
    words = ["train", "--config", str(project), "--pretrained_model_name_or_path=x/y", "--no-plan"]
    done = CliRunner().invoke(build_app(), [*words, "--again-file", str(tmp_path / "again")])
    assert done.exit_code == ends, done.output
    assert (tmp_path / "again").exists() is again
    assert CliRunner().invoke(build_app(), words).exit_code == code


def test_train_that_may_not_start_says_every_problem(project: Path) -> None:
    told = asked("train", "--config", str(project), "--lerning_rate=1", "--max_train_stepz=3", "--json", code=2)
    assert told["ok"] is False and told["exit_code"] == 2
    assert len(told["problems"]) == 2


@pytest.mark.parametrize("words", [("config", "check", "none.json"), ("report", "nowhere"), ("setup", "--release=0.1")])
def test_whatever_a_command_refuses_it_says_so_in_one_object(words: tuple[str, ...]) -> None:
    told = asked(*words, "--json", code=2)
    assert told["ok"] is False and told["exit_code"] == 2 and told["reason"]


def test_an_installer_that_failed_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    from simpletuner_gh200.operate import installing
    from simpletuner_gh200.upstream import importing

    monkeypatch.setattr(importing, "PROBE", (sys.executable, "-S", "-c", 'print(\'{"cause": "broken"}\')'))
    failing = (sys.executable, "-c", "print('loud'); raise SystemExit('no room')")
    monkeypatch.setattr(installing, "installers", lambda: {"pip": failing})
    assert "no room" in asked("setup", "--json", code=1)["reason"]


def test_a_dry_run_is_its_command_and_environment(project: Path) -> None:
    told = asked("train", "--config", str(project), "--no-plan", "--dry-run", "--json")
    assert "simpletuner_gh200.launch" in told["command"]
    assert isinstance(told["environment"], dict)
