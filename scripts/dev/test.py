#!/usr/bin/env python3
"""Run the tests against every SimpleTuner this machine can run: lint once, then pytest in each environment."""

from __future__ import annotations

import os
import subprocess
import sys
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
    for folder, version in environments:
        print(f"\n=== SimpleTuner {version} ({folder}) ===", flush=True)
        command = [str(ROOT / folder / "bin" / "python"), "-m", "pytest", "tests"]
        if subprocess.run(command, cwd=ROOT, env=variables).returncode:
            failed.append(f"tests on SimpleTuner {version}")
    ran = ", ".join(version for _, version in environments)
    print(f"\nran against SimpleTuner {ran}; " + (f"FAILED: {'; '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
