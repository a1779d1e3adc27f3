"""Where SimpleTuner does not import, every command that needs it says so in one line, and starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner_gh200.upstream import child, importing
from tests.unit.broken_site import HIDDEN, LAZILY_BROKEN, write_site

Run = Callable[..., tuple[int, str, str]]

COMMANDS = (
    "config check config.json",
    "train --config config.json",
    "train --config config.json --dry-run",
    "demo --folder made",
    "plan config.json",
    "init made --data images",
    "init made --data images --model wan",
    "prove --folder made",
    "server",
)


@pytest.fixture
def run(tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch, gh200: Run) -> Run:
    """A command in a folder with a sound configuration, beside a SimpleTuner that newer packages broke."""
    package = write_site(
        tmp_path / "site", trainer=LAZILY_BROKEN, torch="2.15.0", torchaudio="2.11.0", transformers="5.23.0"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(importing, "find_package", lambda _name: package)  # another test may have imported the real one
    monkeypatch.setattr(importing, "PROBE", (sys.executable, "-m", "simpletuner_gh200.seams.probe"))
    folder = tmp_path / "folder"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.png").write_bytes(b"no image")
    (folder / "config.json").write_text(json.dumps({"model_family": "sdxl", "model_type": "lora", "output_dir": "o"}))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "400")
    return gh200


@pytest.mark.parametrize("command", COMMANDS)
def test_one_line_and_exit_code_2(run: Run, tmp_path: Path, command: str) -> None:
    code, out, err = run(*command.split())
    (line,) = err.splitlines()
    assert (code, out) == (2, "") and line.startswith("gh200: SimpleTuner 4.10.1 does not import here: ImportError: ")
    assert HIDDEN in line and "`gh200 setup --release 4.10.1`" in line
    assert "torch 2.15.0, tested 2." in line and "transformers 5.23.0, tested 5." in line
    assert not (tmp_path / "folder" / "made").exists() and not (tmp_path / "folder" / "o").exists()


def test_the_kill_switch_does_not_hide_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLETUNER_GH200", "0")
    code, _out, err = run("train", "--config", "config.json")
    assert code == 2 and len(err.splitlines()) == 1 and HIDDEN in err


def test_the_same_for_a_script(run: Run) -> None:
    code, out, err = run("train", "--config", "config.json", "--json")
    told = json.loads(out)
    assert (code, told["ok"], told["exit_code"]) == (2, False, 2)
    assert HIDDEN in told["reason"] and told["reason"] in err


def test_what_stands_alone_goes_on(run: Run, tmp_path: Path) -> None:
    ramp = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 2, "target_effective_batch_size": 8}
    config = {"train_batch_size": 2, "max_train_steps": 20, "gh200_optimizations": {**ramp, "batch_rampup_steps": 10}}
    (tmp_path / "folder" / "ramp.json").write_text(json.dumps(config))
    for command in ("ramp ramp.json", "env", "--help", "stage images --verify none"):
        code, out, err = run(*command.split())
        assert code == 0 and out and HIDDEN not in err, command


def test_the_doctor_fails_it_with_cause_versions_and_command(run: Run) -> None:
    code, out, err = run("doctor", "--json", "--skip-allocation")
    (found,) = [check for check in json.loads(out)["checks"] if check["code"] == "GH109"]
    assert (code, err, found["status"], found["fix"]) == (1, "", "fail", "gh200 setup --release 4.10.1")
    assert found["found"].startswith(f"SimpleTuner 4.10.1: ImportError: {HIDDEN}; torch 2.15.0, tested 2.")
    _code, out, _err = run("doctor", "--skip-allocation")
    assert "not ready" in out.splitlines()[0] and HIDDEN in out


def test_what_failed_is_looked_at_again_by_every_command(run: Run, tmp_path: Path) -> None:
    """What mends it may lie outside of Python, or have failed on another machine of the same home."""
    assert HIDDEN in run("plan", "config.json")[2]
    trainer = tmp_path / "site" / "simpletuner" / "helpers" / "training" / "trainer.py"
    trainer.write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    assert "libcudnn.so.9" in run("plan", "config.json")[2]
    assert "libcudnn.so.9" in run("doctor", "--json", "--skip-allocation")[1], "as every job of train.sbatch begins"


def test_an_import_without_end_is_a_failure_of_the_doctor_and_stops_nothing_else(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "DEADLINE_SECONDS", 0.2)
    write_site(tmp_path / "site", trainer="import time; time.sleep(600)")
    (found,) = [check for check in json.loads(run("doctor", "--json")[1])["checks"] if check["code"] == "GH109"]
    assert found["status"] == "fail" and "not done after 0.2 s" in found["found"] and "importtime" in found["fix"]
    _code, out, err = run("plan", "config.json", "--no-trace", "--json")
    assert json.loads(out)["machine"] == "gh200-96" and err == ""
