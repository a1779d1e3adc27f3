"""Tests of the tree, in a process of their own: upstream's before anything is touched, ours after."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.compat.rebase.tree import HOME, VENDOR
from simpletuner_gh200.config.environment import NO_BYTECODE, SWITCH, for_child, python_path
from simpletuner_gh200.units import counted
from simpletuner_gh200.upstream.check import check
from simpletuner_gh200.upstream.source import folder_source, with_installed_accelerate


@dataclass(frozen=True)
class TreeTest:
    """``outcome``: passed, failed, skipped."""

    name: str
    outcome: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome}" + (f" ({self.detail})" if self.detail else "")


def smoke(root: Path) -> list[TreeTest]:
    """Upstream as it is: every module parses, every seam holds, the package can be imported."""
    return [_parses(root, "simpletuner"), _contract(root), _imports(root, "import simpletuner", "import")]


def integration(root: Path) -> list[TreeTest]:
    """With our package in: seams still hold, the way in works, and off is off."""
    on = (
        "from simpletuner.gh200 import gh200_uvm_enabled, optimize_batch_for_gh200; import simpletuner.gh200.uvm; "
        "from simpletuner_gh200.seams.bootstrap import active; assert active() is not None, 'not active'; "
        "import simpletuner_gh200; where = simpletuner_gh200.__file__; "
        f"assert where.startswith({str(root / VENDOR)!r}), where"
    )
    off = "assert 'simpletuner_gh200' not in sys.modules, 'imported in spite of SIMPLETUNER_GH200=0'"
    return [
        _parses(root, HOME),
        _contract(root),
        _imports(root, on, "active, with the public names"),
        _imports(root, off, "kill switch", {SWITCH: "0"}),
    ]


def _parses(root: Path, folder: str) -> TreeTest:
    broken = []
    paths = sorted((root / folder).rglob("*.py"))
    for path in paths:
        try:
            ast.parse(path.read_bytes())
        except SyntaxError as error:
            broken.append(f"{path.relative_to(root)}: {error.msg}")
    return TreeTest("syntax", "failed" if broken else "passed", "; ".join(broken[:3]) or counted(len(paths), "file"))


def _contract(root: Path) -> TreeTest:
    verdict = check(with_installed_accelerate(folder_source(root)))
    broken = [f"{row.name}: {row.found}" for row in verdict.broken]
    detail = "; ".join(broken) or f"SimpleTuner {verdict.version}, {len(verdict.seams)} seams"
    return TreeTest("contract", "failed" if broken else "passed", detail)


def _imports(root: Path, code: str, name: str, added: dict[str, str] | None = None) -> TreeTest:
    """Import from the tree; skipped where what SimpleTuner needs is not installed in this Python."""
    environment = for_child({"PYTHONPATH": python_path(root), NO_BYTECODE: "1", **(added or {})})
    guarded = (
        f"import simpletuner, sys; assert simpletuner.__file__.startswith({str(root)!r}), simpletuner.__file__; {code}"
    )
    done = subprocess.run([sys.executable, "-c", guarded], env=environment, capture_output=True, text=True, cwd=root)
    if done.returncode == 0:
        return TreeTest(name, "passed", "")
    last = _last_line(done.stderr)
    missing = last.startswith("ModuleNotFoundError") and "simpletuner" not in last
    return TreeTest(name, "skipped" if missing else "failed", last)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
