#!/usr/bin/env python3
"""Run the tests against every SimpleTuner this machine can run.

    python3 scripts/dev/test.py            lint, types and layers; then the tests
    python3 scripts/dev/test.py matrix     further combinations of real runs, in every environment
    python3 scripts/dev/test.py chaos      every hostile trial (tests/chaos); last line: N passed, N failed, N skipped

The first environment runs everything; the others run what can depend on SimpleTuner's release or its torch
(tests/releases.py). Side by side, since each training job uses one core. The output of an environment is shown as a
whole when it is done.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITE = ("tests", "failures", "errors", "skipped")
"""What pytest's results count."""


def main(what: str) -> int:
    if what not in {"", "matrix", "chaos"}:
        print(__doc__, file=sys.stderr)
        return 2
    built = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "dev" / "environments.py"), "test"], stdout=subprocess.PIPE, text=True
    )
    if built.returncode:
        return built.returncode
    environments = [line.split() for line in built.stdout.splitlines()]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    variables["GH200_SLOW_TESTS"] = "1"
    variables["GH200_RELEASES"] = ",".join(version for _, version in environments)
    failed = []
    if not what and subprocess.run(["make", "--no-print-directory", "lint"], cwd=ROOT, env=variables).returncode:
        failed.append("lint")
    failed += [f"tests on SimpleTuner {version}" for version in run_side_by_side(environments, what, variables)]
    ran = ", ".join(version for _, version in environments)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\nran against SimpleTuner {ran}, {(spent.ru_utime + spent.ru_stime) / 60:.1f} minutes of CPU: ", end="")
    print(f"FAILED: {'; '.join(failed)}" if failed else "all passed")
    if what == "chaos":
        print(counted([results(version) for _, version in environments]))
    return 1 if failed else 0


def results(version: str) -> Path:
    """Where pytest writes what became of each test in an environment."""
    return ROOT / ".cache" / f"tests-{version}.xml"


def counted(files: list[Path]) -> str:
    """Over all environments. One that got as far as no results has failed."""
    total: Counter[str] = Counter()
    for path in files:
        suites = ElementTree.parse(path).getroot().iter("testsuite") if path.is_file() else ()
        ran = [suite for suite in suites if int(suite.get("tests", 0))]
        total["failed"] += not ran
        for suite in ran:
            tests, failures, errors, skipped = (int(suite.get(name, 0)) for name in SUITE)
            total.update(failed=failures + errors, skipped=skipped, passed=tests - failures - errors - skipped)
    return f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped"


def selection(number: int, what: str) -> str:
    """For pytest's ``-m``: which tests run in this environment."""
    wanted = {"": "not matrix and not chaos", "matrix": "matrix", "chaos": ""}[what]
    return " and ".join(filter(None, (wanted, "releases" if number else "")))


def run_side_by_side(environments: list[list[str]], what: str, variables: dict[str, str]) -> list[str]:
    """The versions whose tests failed. While they run, a line a minute says so: silence looks like a hang."""
    running = {}
    logs = ROOT / ".cache"
    logs.mkdir(exist_ok=True)
    for number, (folder, version) in enumerate(environments):
        command = [str(ROOT / folder / "bin" / "python"), "-m", "pytest", "-rs", "--durations=12"]
        results(version).unlink(missing_ok=True)
        command += ["tests/chaos" if what == "chaos" else "tests", f"--junitxml={results(version)}"]
        log = logs / f"tests-{version}.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "-m", selection(number, what)],
                cwd=ROOT,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        running[version] = (process, log)
    started = shown = time.monotonic()
    failed = []
    while running:
        time.sleep(1)
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            print(f"... testing against SimpleTuner {', '.join(running)}, {(shown - started) / 60:.0f} min", flush=True)
        for version, (process, log) in list(running.items()):
            if process.poll() is None:
                continue
            del running[version]
            print(f"\n=== SimpleTuner {version} ===\n{log.read_text(errors='replace')}", flush=True)
            if process.returncode:
                failed.append(version)
    return failed


if __name__ == "__main__":
    sys.exit(main("".join(sys.argv[1:])))
