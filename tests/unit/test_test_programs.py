"""The programs that tests need: installed where they are missing and the user may, else named with the command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.nobody import as_nobody

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "dev" / "install_test_programs.sh"
ASKED = ("zsh", "srun", "fish")
NAMED = "missing: zsh slurm-client; install with: sudo apt-get install --no-install-recommends zsh slurm-client\n"
SUDO = 'shift; exec "$@"'


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine that has fish, neither zsh nor Slurm, and an apt-get that writes down what it was asked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "dirname", "id", "env", "true"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    program(folder, "fish", "exit 1")
    program(folder, "apt-get", f'echo "$DEBIAN_FRONTEND" "$@" >>{tmp_path}/asked')
    return folder


def program(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def install(machine: Path, *programs: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(script), *programs]
    return subprocess.run(command, env={"PATH": str(machine)}, capture_output=True, text=True)


def asked(machine: Path) -> list[str]:
    path = machine.parent / "asked"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("user", ["root", "sudo"])
def test_what_is_missing_is_installed_and_nothing_else(machine: Path, user: str) -> None:
    program(machine, "id", "echo 0" if user == "root" else "echo 1000")
    program(machine, "sudo", "exit 1" if user == "root" else SUDO)
    done = install(machine, *ASKED)
    assert (done.returncode, done.stderr) == (0, "installing: zsh slurm-client\n")
    assert asked(machine) == [
        " update -qq",
        "noninteractive install -y -qq --no-install-recommends zsh slurm-client",
    ]


def test_where_all_is_there_nobody_is_asked_for_anything(machine: Path) -> None:
    program(machine, "id", "echo 1000")
    done = install(machine, "fish")
    assert (done.returncode, done.stdout, done.stderr, asked(machine)) == (0, "", "", [])


@pytest.mark.parametrize("sudo", ["exit 1", None])
def test_who_may_not_install_is_told_what_and_how(machine: Path, sudo: str | None) -> None:
    program(machine, "id", "echo 1000")
    if sudo is not None:
        program(machine, "sudo", f'[ "$1" = -n ] || read -r password\n{sudo}')
    done = install(machine, *ASKED)
    assert (done.returncode, done.stderr) == (1, NAMED)
    assert asked(machine) == []


def test_a_real_other_user_is_told_too(machine: Path) -> None:
    copy = machine.parent / "scripts" / "dev" / SCRIPT.name
    copy.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, copy)

    def work() -> None:
        done = install(machine, *ASKED, script=copy)
        assert (done.returncode, done.stderr) == (1, NAMED), done

    assert as_nobody(work, machine) == 0


def test_a_machine_without_apt_is_told_what_is_missing(machine: Path) -> None:
    (machine / "apt-get").unlink()
    assert install(machine, *ASKED).stderr == NAMED


def test_what_can_not_be_installed_fails(machine: Path) -> None:
    program(machine, "id", "echo 0")
    program(machine, "apt-get", '[ "$1" = update ] || { echo "no such package" >&2; exit 100; }')
    done = install(machine, *ASKED)
    assert (done.returncode, done.stderr) == (100, "installing: zsh slurm-client\nno such package\n")
