"""``gh200 doctor`` from the command line: exit codes, the report file, one JSON object, nothing secret."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from simpletuner_gh200.cli.main import main
from simpletuner_gh200.diagnostics.check import all_checks
from tests.unit.broken_site import write_site
from tests.unit.diagnostics.machine import Machine

SCRIPT = Path(__file__).parents[3] / "gh200_diagnostic.py"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys) -> Callable[..., Done]:
    """``gh200 doctor`` in a folder of its own, in this process: a start of Python costs more than the checks."""

    def run(*arguments: str, **environment: str) -> Done:
        monkeypatch.chdir(tmp_path)
        for name, value in {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "160", **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["gh200", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return Done(int(ended.value.code or 0), shown.out, shown.err)

    return run


def test_the_script_of_the_guides_takes_the_same_options(machine: Machine, tmp_path: Path) -> None:
    options = [
        "--oversubscription-scale",
        "1.5",
        "--skip-allocation",
        "--output",
        "r.json",
        "--root",
        str(machine.root),
    ]
    write_site(tmp_path / "quick", trainer="")
    quick = {**os.environ, "PYTHONPATH": str(tmp_path / "quick")}
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, cwd=tmp_path, env=quick, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert "gh200 doctor" in done.stdout
    assert (tmp_path / "r.json").is_file()


def test_the_last_line_is_the_report_and_the_file_is_the_same(
    doctor: Callable[..., Done], machine: Machine, tmp_path: Path
) -> None:
    done = doctor("--json", "--root", str(machine.root), "--skip-allocation", "--output", "r.json")
    assert done.returncode in (0, 1), done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report == json.loads((tmp_path / "r.json").read_text())
    assert {"code", "what", "why", "found", "fix", "status"} <= report["checks"][0].keys()
    assert report["summary"]["pass"] == sum(check["status"] == "pass" for check in report["checks"])


def test_a_failed_check_is_exit_1_and_the_default_file_is_written(
    doctor: Callable[..., Done], machine: Machine, tmp_path: Path
) -> None:
    machine.limits(files="64")
    done = doctor("--root", str(machine.root))
    assert done.returncode == 1, done.stderr
    assert "✅" in done.stdout
    assert "ulimit -n" in done.stdout
    assert (tmp_path / "gh200_diagnostic_report.json").is_file()


def test_the_verdict_comes_first_then_what_is_wrong_then_the_rest(
    doctor: Callable[..., Done], machine: Machine
) -> None:
    machine.limits(files="64", locked="65536")
    lines = doctor("--root", str(machine.root), COLUMNS="80").stdout.splitlines()
    assert lines[0].startswith("gh200 doctor: not ready: ") and "failed" in lines[0]
    assert " warning" in lines[1] and "report in gh200_diagnostic_report.json" in lines[1]
    wrong, passed = (next(n for n, line in enumerate(lines) if line.startswith(mark)) for mark in ("❌", "✅"))
    warned = next(n for n, line in enumerate(lines) if line.startswith("⚠️"))
    assert 1 < wrong < warned < passed
    assert [line for line in lines if line.startswith("➖")] == [lines[-1]], "skips are one line, the last"
    assert "GH213, GH214, GH216" in lines[-1] and "no configuration was given (GH401, GH407)" in lines[-1]


def test_fixes_are_whole_when_piped(doctor: Callable[..., Done], machine: Machine, tmp_path: Path) -> None:
    machine.limits(files="64", locked="65536")
    done = doctor("--root", str(machine.root), COLUMNS="40")
    report = json.loads((tmp_path / "gh200_diagnostic_report.json").read_text())
    wrong = [check for check in report["checks"] if check["status"] in {"fail", "warn"}]
    assert wrong
    for check in wrong:
        assert f"fix:   {check['fix']}" in done.stdout
    assert "…" not in done.stdout


def test_verbose_explains_what_was_skipped_too(doctor: Callable[..., Done], machine: Machine, tmp_path: Path) -> None:
    done = doctor("--root", str(machine.root), "--verbose")
    report = json.loads((tmp_path / "gh200_diagnostic_report.json").read_text())
    assert done.stdout.count("➖ GH") == report["summary"]["skip"] > 0
    (why,) = [check.why for check in all_checks() if check.code == "GH407"]
    assert why in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["nowhere.json"], ["--oversubscription-scale", "many"], ["--output", "no/such/folder/r.json"], ["--what"]],
)
def test_usage_errors_are_exit_2(doctor: Callable[..., Done], arguments: list[str]) -> None:
    done = doctor(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_planted_secrets_stay_out(doctor: Callable[..., Done], machine: Machine, tmp_path: Path) -> None:
    planted = "hf_" + "Zq9" * 11
    machine.configure(gh200_optimizations={"enable_uvm_hints": planted}, hub_token=planted)
    hidden = {"PYTORCH_CUDA_ALLOC_CONF": f"token:{planted}", "GH200_UVM_ACCESS_PATTERN": planted, "HF_TOKEN": planted}
    done = doctor(str(machine.config), "--json", "--root", str(machine.root), **hidden)
    assert done.returncode == 1
    report = (tmp_path / "gh200_diagnostic_report.json").read_text()
    assert planted not in done.stdout + done.stderr + report
    assert "<hidden>" in done.stdout


def test_the_report_is_for_its_owner(doctor: Callable[..., Done], machine: Machine, tmp_path: Path) -> None:
    doctor("--root", str(machine.root))
    mode = (tmp_path / "gh200_diagnostic_report.json").stat().st_mode
    assert stat.S_IMODE(mode) & 0o022 == 0
