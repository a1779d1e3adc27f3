"""Upstream's own tests with and without the extension, compared outcome by outcome.

A test that differs is run once more without the extension: one that then differs from itself is unstable, and says
nothing about us.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import SWITCH, for_child, python_path
from simpletuner_gh200.errors import RunFailed, UsageError

Outcomes = Mapping[str, str]
"""passed, failed, error or skipped, by test."""

# The hooks are registered before pytest imports anything of SimpleTuner's, as the start-up hook would do it.
WITH = (
    "import sys; from simpletuner_gh200.startup import on_interpreter_start; on_interpreter_start(); "
    "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)
WITHOUT = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


@dataclass(frozen=True)
class Difference:
    test: str
    without: str
    with_extension: str
    unstable: bool = False


@dataclass(frozen=True)
class Parity:
    """``ok``: every test that has an opinion has the same one with the extension."""

    counts: dict[str, int]
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return all(difference.unstable for difference in self.differences)

    def lines(self) -> Iterator[str]:
        for each in self.differences:
            kind = "unstable" if each.unstable else "DIFFERS"
            yield f"{kind}: {each.test}: {each.without} without, {each.with_extension} with the extension"
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        yield f"without the extension: {counts}; with it: {'the same' if self.ok else 'not the same'}"

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "counts": self.counts, "differences": [vars(each) for each in self.differences]}


def run_parity(checkout: Path, arguments: Sequence[str]) -> Parity:
    """Run the checkout's tests twice; ``arguments`` go to pytest (default: its ``tests`` folder)."""
    if not (checkout / "simpletuner").is_dir():
        raise UsageError(f"no SimpleTuner in {checkout}", remedy="give a checkout of its repository")
    if not arguments and not (checkout / "tests").is_dir():
        remedy = "wheels have none; clone the repository or unpack the source distribution"
        raise UsageError(f"no tests in {checkout}", remedy=remedy)
    wanted = list(arguments) or ["tests"]
    without = run_tests(checkout, wanted, extension=False)
    counts = dict(Counter(without.values()))
    if "passed" not in counts:
        found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none ran"
        raise RunFailed(
            f"no test passed without the extension ({found}), so there is nothing to compare",
            remedy="install what the tests need, or name others",
        )
    differences = compare(without, run_tests(checkout, wanted, extension=True))
    if differences:
        again = run_tests(checkout, wanted, extension=False)
        differences = [replace(one, unstable=again.get(one.test, GONE) != one.without) for one in differences]
    return Parity(counts, tuple(differences))


GONE = "missing"


def compare(without: Outcomes, with_extension: Outcomes) -> list[Difference]:
    tests = sorted(without.keys() | with_extension.keys())
    found = (Difference(test, without.get(test, GONE), with_extension.get(test, GONE)) for test in tests)
    return [one for one in found if one.without != one.with_extension]


def run_tests(checkout: Path, arguments: Sequence[str], *, extension: bool) -> Outcomes:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # A file that can't be imported here is one error, not the end: the others are still to be compared.
        options = ["-p", "no:cacheprovider", "-q", "--continue-on-collection-errors"]
        options += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-c", WITH if extension else WITHOUT, *options, *arguments]
        environment = for_child({"PYTHONPATH": python_path(checkout), SWITCH: "1" if extension else "0"})
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if not report.is_file():
            raise RunFailed(f"pytest left no report (exit code {done.returncode}): {done.stderr.strip()[-500:]}")
        return outcomes(report)


def outcomes(report: Path) -> Outcomes:
    """By test, from pytest's JUnit report, which we had written ourselves a moment ago."""
    verdicts = {"error": "error", "failure": "failed", "skipped": "skipped"}
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        verdict = next((verdict for tag, verdict in verdicts.items() if tag in kinds), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = verdict
    return found
