"""The whole rebase on real SimpleTuner source: a fork as the earlier guides describe it, onto the installed release."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner_gh200.config.files import find_package

PACKAGE = find_package("simpletuner")
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.one_release("4."),
    pytest.mark.skipif(PACKAGE is None, reason="no SimpleTuner installed"),
]
SCRIPT = Path(__file__).parents[2] / "execute_gh200_rebase.sh"
TRAINER = "simpletuner/helpers/training/trainer.py"
RAMP = "\n\nclass GH200GradientRamp:\n    def __init__(self, initial, target):\n        self.initial = initial\n"


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "core.autocrlf=false", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def rebase(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simpletuner_gh200", "rebase", *arguments, "--repo", str(root)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """Upstream, then a fork that adds a ramp to the trainer and loses manual validation on the way."""
    assert PACKAGE is not None
    root = tmp_path / "fork"
    ignore = shutil.ignore_patterns("__pycache__", "*.js", "*.css", "*.html", "*.svg", "*.png", "*.json", "static")
    shutil.copytree(PACKAGE, root / "simpletuner", ignore=ignore)
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "config", "user.name", "tester")
    git(root, "config", "user.email", "tester@example.org")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "upstream")
    git(root, "tag", "upstream")
    git(root, "switch", "--quiet", "--create", "fork")
    text = (root / TRAINER).read_text(encoding="utf-8")
    lost = text.replace("def _consume_manual_validation_request(self)", "def _gone(self)")
    assert lost != text
    (root / TRAINER).write_text(lost + RAMP, encoding="utf-8")
    (root / "simpletuner/gh200").mkdir()
    (root / "simpletuner/gh200/__init__.py").write_text("", encoding="utf-8")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "fork")
    return root


def checklist_of(tree: Path) -> str:
    """What is left to do, once only what the extension replaces has changed."""
    assert git(tree, "diff", "--diff-filter=MDR", "--name-only", "upstream", "HEAD") == "simpletuner/__init__.py"
    checklist = (tree / "GH200_REBASE_CHECKLIST.md").read_text(encoding="utf-8")
    assert f"- [ ] {TRAINER}\n" in checklist
    assert "- [ ] simpletuner/gh200" not in checklist, "the package takes its place"
    return checklist


@pytest.mark.matrix  # its trials import SimpleTuner again and again; without them: the script's test below
def test_a_fork_is_replaced_by_the_extension_and_can_be_had_back(fork: Path) -> None:
    done = rebase(fork, "start", "--onto", "upstream")
    assert done.returncode == 0, done.stdout + done.stderr
    checklist = checklist_of(fork)
    for passed in ("contract: passed", "active, with the public names: passed", "kill switch: passed"):
        assert passed in checklist

    state = json.loads(rebase(fork, "status", "--json").stdout.splitlines()[-1])
    assert state["finished"] is True
    assert rebase(fork, "rollback", "--yes").returncode == 0
    assert git(fork, "rev-parse", "HEAD") == state["original_commit"]
    assert git(fork, "status", "--porcelain") == ""


def test_the_thin_script_starts_goes_on_and_goes_back(fork: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--branch", "fork", str(fork), str(clone))
    for name in ("user.name", "user.email"):
        git(clone, "config", name, "tester@example.org")

    def script(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "REPO": str(clone)}
        return subprocess.run([SCRIPT, *arguments], env=environment, input=answer, capture_output=True, text=True)

    assert script("--nonsense").returncode == 2
    done = script("--skip-tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert git(clone, "branch", "--show-current") == "gh200-reintegration"
    assert checklist_of(clone)
    assert script("--rollback", answer="n\n").returncode == 1
    assert script("--rollback", answer="y\n").returncode == 0
    assert git(clone, "branch", "--show-current") == "fork"
