#!/usr/bin/env python3
"""Run the tests against every SimpleTuner this machine can run.

    python3 scripts/dev/test.py            lint, types and layers; then the tests
    python3 scripts/dev/test.py matrix     further combinations of real runs, in every environment

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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(what: str) -> int:
    if what not in {"", "matrix"}:
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
    return 1 if failed else 0


def selection(number: int, what: str) -> str:
    """For pytest's ``-m``: which tests run in this environment."""
    wanted = what or "not matrix"
    return wanted if number == 0 else f"{wanted} and releases"


def run_side_by_side(environments: list[list[str]], what: str, variables: dict[str, str]) -> list[str]:
    """The versions whose tests failed. While they run, a line a minute says so: silence looks like a hang."""
    running = {}
    logs = ROOT / ".cache"
    logs.mkdir(exist_ok=True)
    for number, (folder, version) in enumerate(environments):
        command = [str(ROOT / folder / "bin" / "python"), "-m", "pytest", "tests", "-rs", "--durations=12"]
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
