"""SimpleTuner at the versions it is tested with, into the environment we run in: `gh200 setup`.

What to install is decided from the interpreter and the machine alone. How: uv if it is there, else pip; if uv fails, a
pip of this environment is tried, which reads its user's own configuration. What changed is told by the environment
itself, looked at before and after, or by the installer where nothing is to change.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.upstream.tested import (
    Tested,
    choose,
    constraints,
    find,
    installed_distributions,
    tested_versions,
)

LAST_LINES = 12
"""Of a failed installer, shown."""


PLANNED = {"uv": re.compile(r"^ \+ ([^\s=]+)==(\S+)", re.MULTILINE), "pip": re.compile(r"(\S+)-(\S+)")}
"""How each names, in a dry run, what it would install: a line per package, or all of them in one line."""


def decide(release: str | None, *, python: str, machine: str) -> Tested:
    """The newest tested release for this interpreter and machine, or the one asked for, if it is tested with them."""
    if release is None:
        return choose(python, machine)
    wanted = find(release)
    if python in wanted.pythons and machine in wanted.machines:
        return wanted
    raise UsageError(
        f"SimpleTuner {release} is tested with Python {' or '.join(wanted.pythons)} on {' or '.join(wanted.machines)}, "
        f"and this is Python {python} on {machine}",
        remedy=f"make a virtual environment with one of these, python{wanted.pythons[0]} -m venv say",
    )


def installers() -> dict[str, tuple[str, ...]]:
    """Commands by name of those that are here, in the order in which they are tried."""
    found = {}
    if uv := (path,) if (path := shutil.which("uv")) else _module("uv"):
        found["uv"] = (*uv, "pip", "install", "--compile-bytecode", "--python", sys.executable)
    if pip := _module("pip"):
        found["pip"] = (*pip, "install", "--disable-pip-version-check")
    if not found:
        raise UsageError("neither uv nor pip is here", remedy=f"{sys.executable} -m ensurepip")
    return found


def install(wanted: Tested, *, cpu: bool, dry_run: bool = False, show: bool = False) -> tuple[str, list[str]]:
    """The installer's name, and what changed (or would) as ``name old -> new``. ``show``: its own words go through."""
    before = installed_distributions()
    with tempfile.TemporaryDirectory(prefix="gh200-setup-") as folder:
        pins = Path(folder, "constraints.txt")
        pins.write_text(constraints(wanted.release, cpu=cpu), encoding="utf-8")
        # Named as well: what is here and pinned without SimpleTuner's needing it, our own codecs for instance.
        here = sorted(before.keys() & tested_versions(wanted.release, cpu=cpu).keys() - {"simpletuner"})
        words = [wanted.requirement(cpu=cpu), *here, "-c", str(pins)]
        if dry_run:
            installer, output = _first_that_works(["--dry-run", *words], show=False)
            return installer, changes(before, {**before, **planned(installer, output)})
        installer, _ = _first_that_works(words if show else ["--quiet", *words], show=show)
    importlib.invalidate_caches()
    return installer, changes(before, installed_distributions())


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    told = [(name, before.get(name, "none"), after.get(name, "none")) for name in names]
    return [f"{name} {old} -> {new}" for name, old, new in told if old != new]


def planned(installer: str, output: str) -> dict[str, str]:
    """Versions by normalized name, from what the installer printed in a dry run."""
    found = "".join(output.partition("Would install ")[2].splitlines()[:1]) if installer == "pip" else output
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PLANNED[installer].findall(found)}


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name) if importlib.util.find_spec(name) is not None else ()


def _first_that_works(words: Sequence[str], *, show: bool) -> tuple[str, str]:
    """Its name, and what it printed if that was not shown."""
    # Where sphn has no wheel, aarch64, it builds a libopus that CMake 4 refuses without this.
    environment = {"CMAKE_POLICY_VERSION_MINIMUM": "3.5", **os.environ}
    failures = []
    for installer, command in installers().items():
        captured = None if show else subprocess.PIPE
        ran = subprocess.run(
            [*command, *words], env=environment, stdin=subprocess.DEVNULL, stdout=captured, stderr=captured, text=True
        )
        if ran.returncode == 0:
            return installer, f"{ran.stdout}{ran.stderr}"
        told = (ran.stderr or "its own words are above").strip().splitlines()[-LAST_LINES:]
        failures.append("\n  ".join([f"{installer} ended with exit code {ran.returncode}:", *told]))
    raise RunFailed("\n".join(failures), remedy="gh200 constraints > pins.txt, then install with -c pins.txt yourself")
