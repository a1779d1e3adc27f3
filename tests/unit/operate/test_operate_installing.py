"""`gh200 setup`: what it decides, what it asks uv or pip for, what it says about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.operate import installing
from simpletuner_gh200.operate.installing import changes, decide, install, installers, planned
from simpletuner_gh200.upstream.tested import constraints, find

UV = """#!/bin/sh
# Stands for uv: keeps its words and the constraints it was given, and "installs" what the test laid out for it.
echo "$@" >>"$0.called"
for word in "$@"; do [ -f "$word" ] && case "$word" in *.txt) cp "$word" "$0.constraints" ;; esac; done
case " $* " in *" --dry-run "*) cat "$0.plan" >&2; exit 0 ;; esac
[ -f "$0.fails" ] && { cat "$0.fails" >&2; exit 2; }
cp -r "$0.packages/." "$(cat "$0.site")"
"""


@pytest.fixture
def uv(tmp_path, monkeypatch) -> Path:
    """A uv on PATH that records what it is asked, and a folder of packages that it installs into."""
    program = tmp_path / "bin" / "uv"
    site = tmp_path / "site"
    for folder in (program.parent, site, Path(f"{program}.packages")):
        folder.mkdir()
    program.write_text(UV)
    program.chmod(0o755)
    Path(f"{program}.site").write_text(str(site))
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "path", [str(site)])
    return program


def distribution(folder: Path, name: str, version: str) -> None:
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)


@pytest.mark.parametrize(
    ("release", "python", "machine", "chosen"),
    [(None, "3.13", "aarch64", "4.10.1"), (None, "3.11", "x86_64", "3.1.6"), ("4.10.1", "3.12", "x86_64", "4.10.1")],
)
def test_what_is_installed_is_decided_by_the_interpreter_and_the_machine(release, python, machine, chosen):
    assert decide(release, python=python, machine=machine).release == chosen


@pytest.mark.parametrize(
    ("release", "python", "machine", "quoted"),
    [
        ("4.10.1", "3.11", "x86_64", "Python 3.13 or 3.12 on x86_64 or aarch64, and this is Python 3.11 on x86_64"),
        ("3.1.6", "3.11", "aarch64", "Python 3.11 on x86_64, and this is Python 3.11 on aarch64"),
        ("5.0", "3.13", "x86_64", "'5.0' is not among the releases that are tested: 4.10.1, 3.1.6"),
    ],
)
def test_a_release_that_was_not_tested_so_is_refused_with_what_was(release, python, machine, quoted):
    with pytest.raises(UsageError) as refused:
        decide(release, python=python, machine=machine)
    assert quoted in str(refused.value)


@pytest.mark.parametrize(("cpu", "extra"), [(True, "cpu"), (False, "cuda13")])
def test_uv_is_asked_for_the_release_with_its_constraints(uv, cpu, extra):
    name, changed = install(find("4.10.1"), cpu=cpu)
    assert (name, changed) == ("uv", [])
    asked = Path(f"{uv}.called").read_text()
    assert asked.startswith(f"pip install --compile-bytecode --python {sys.executable} --quiet ")
    assert f" simpletuner[{extra}]==4.10.1 -c " in asked
    assert Path(f"{uv}.constraints").read_text() == constraints("4.10.1", cpu=cpu)


def test_what_changed_is_what_the_environment_has_afterwards(uv, tmp_path):
    distribution(tmp_path / "site", "torch", "2.14.1")
    distribution(Path(f"{uv}.packages"), "Torch_Optimi", "0.3.3")
    assert install(find("4.10.1"), cpu=True) == ("uv", ["torch-optimi none -> 0.3.3"])


def test_whatever_is_here_and_pinned_gets_its_tested_version(uv, tmp_path):
    for name, version in (("isal", "1.9.1"), ("simpletuner", "4.10.0"), ("somebodys_own", "1.0")):
        distribution(tmp_path / "site", name, version)
    install(find("4.10.1"), cpu=True)
    assert " simpletuner[cpu]==4.10.1 isal -c " in Path(f"{uv}.called").read_text()


def test_a_dry_run_installs_nothing_and_says_what_would_change(uv, tmp_path):
    distribution(tmp_path / "site", "torch", "2.15.0")
    Path(f"{uv}.plan").write_text(
        "Resolved 3 packages\nWould install 2 packages\n - torch==2.15.0\n + torch==2.14.1\n + diffusers==0.41.0\n"
    )
    name, changed = install(find("4.10.1"), cpu=True, dry_run=True)
    assert (name, changed) == ("uv", ["diffusers none -> 0.41.0", "torch 2.15.0 -> 2.14.1"])
    assert [" --dry-run " in call for call in Path(f"{uv}.called").read_text().splitlines()] == [True]


def test_what_pip_would_install_is_read_from_its_line():
    said = "Collecting torch-optimi\nWould install Torch_Optimi-0.3.3 nvidia-cudnn-cu13-9.24.0.43 torch-2.9.1+cpu\n"
    assert planned("pip", said + "WARNING: a-b-c\n") == {
        "torch-optimi": "0.3.3",
        "nvidia-cudnn-cu13": "9.24.0.43",
        "torch": "2.9.1+cpu",
    }
    assert planned("pip", "Requirement already satisfied: torch-optimi\n") == {}


def test_a_failed_installer_is_quoted(uv, monkeypatch):
    Path(f"{uv}.fails").write_text("error: no space left on device\n")
    monkeypatch.setattr(installing, "_module", lambda name: ())
    with pytest.raises(RunFailed, match="uv ended with exit code 2:\n  error: no space left on device"):
        install(find("4.10.1"), cpu=True)


def test_without_uv_and_pip_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UsageError, match="neither uv nor pip is here"):
        installers()


def test_changes_name_both_versions():
    assert changes({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "3", "d": "4"}) == [
        "b 2 -> 3",
        "c 3 -> none",
        "d none -> 4",
    ]


def setup(uv: Path, tmp_path: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    """`gh200 setup --json` where the packages of ``site`` come first."""
    places = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "simpletuner_gh200", "setup", "--json", *words]
    ran = subprocess.run(command, env=places, cwd=tmp_path, capture_output=True, text=True)
    return ran, json.loads(ran.stdout) if ran.stdout else {}


def simpletuner(site: Path, trainer: str = "") -> None:
    """As much of one as an import looks at; ``make test-matrix`` asks real ones."""
    distribution(site, "simpletuner", "4.10.1")
    (site / "simpletuner-4.10.1.dist-info" / "METADATA").write_text("Name: simpletuner\nVersion: 4.10.1\n")
    package = site / "simpletuner" / "helpers" / "training"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parents[1]):
        (folder / "__init__.py").touch()
    (package / "trainer.py").write_text(trainer)


def test_an_import_that_fails_even_then_ends_with_1_and_its_cause(uv, tmp_path):
    simpletuner(tmp_path / "site", "from json import Qwen3VL\n")
    distribution(Path(f"{uv}.packages"), "added", "0.99")
    ran, told = setup(uv, tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert told == {
        "simpletuner": "4.10.1",
        "installer": "uv",
        "changed": ["added none -> 0.99"],
        "imports": False,
        "cause": told["cause"],
    }
    assert "cannot import name 'Qwen3VL' from 'json'" in told["cause"]


def test_a_dry_run_changes_nothing_and_is_done(uv, tmp_path):
    simpletuner(tmp_path / "site", "from json import Qwen3VL\n")
    Path(f"{uv}.plan").write_text(" + added==0.99\n")
    before = sorted((tmp_path / "site").rglob("*.dist-info"))
    ran, told = setup(uv, tmp_path, "--dry-run", "--cpu")
    assert (ran.returncode, told["imports"], told["installer"]) == (0, False, "uv")
    assert told["changed"] == ["added none -> 0.99"]
    assert sorted((tmp_path / "site").rglob("*.dist-info")) == before


def test_an_environment_that_works_is_left_alone(uv, tmp_path):
    simpletuner(tmp_path / "site")
    ran, told = setup(uv, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert told == {"simpletuner": "4.10.1", "installer": None, "changed": [], "imports": True, "cause": None}
    assert not Path(f"{uv}.called").exists()


def test_another_release_is_installed_where_it_is_asked_for(uv, tmp_path):
    simpletuner(tmp_path / "site")
    os.rename(tmp_path / "site" / "simpletuner-4.10.1.dist-info", tmp_path / "site" / "simpletuner-4.10.0.dist-info")
    (tmp_path / "site" / "simpletuner-4.10.0.dist-info" / "METADATA").write_text("Name: simpletuner\nVersion: 4.10.0\n")
    Path(f"{uv}.plan").write_text(" - simpletuner==4.10.0\n + simpletuner==4.10.1\n")
    release = decide(None, python=f"3.{sys.version_info.minor}", machine=os.uname().machine).release
    ran, told = setup(uv, tmp_path, "--dry-run", "--release", release)
    assert ran.returncode == 0, ran.stderr
    assert (told["simpletuner"], told["imports"]) == ("4.10.0", True)
    assert told["changed"] == ["simpletuner 4.10.0 -> 4.10.1"]
