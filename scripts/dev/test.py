#!/usr/bin/env python3
"""Run the tests against every SimpleTuner this machine can run.

Lint, types and layers first; then pytest in each environment, side by side, since each training job uses one core. The
output of an environment is shown as a whole when it is done.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    built = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "dev" / "environments.py"), "test"], stdout=subprocess.PIPE, text=True
    )
    if built.returncode:
        return built.returncode
    environments = [line.split() for line in built.stdout.splitlines()]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    failed = []
    if subprocess.run(["make", "--no-print-directory", "lint"], cwd=ROOT, env=variables).returncode:
        failed.append("lint")
    failed += [f"tests on SimpleTuner {version}" for version in run_side_by_side(environments, variables)]
    ran = ", ".join(version for _, version in environments)
    print(f"\nran against SimpleTuner {ran}: " + (f"FAILED: {'; '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


def run_side_by_side(environments: list[list[str]], variables: dict[str, str]) -> list[str]:
    """The versions whose tests failed. While they run, a line a minute says so: silence looks like a hang."""
    running = {}
    logs = ROOT / ".cache"
    logs.mkdir(exist_ok=True)
    for number, (folder, version) in enumerate(environments):
        command = [str(ROOT / folder / "bin" / "python"), "-m", "pytest", "tests", "-rs", "--durations=12"]
        log = logs / f"tests-{version}.txt"
        # A million files are as many to one release as to the other: what takes long and never meets SimpleTuner, once.
        asked = variables if number else {**variables, "GH200_SLOW_TESTS": "1"}
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=asked, stdout=output, stderr=subprocess.STDOUT)
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
    sys.exit(main())
