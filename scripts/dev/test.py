#!/usr/bin/env python3
"""Run the tests against every SimpleTuner this machine can run.

    python3 scripts/dev/test.py            lint, types and layers; then the tests
    python3 scripts/dev/test.py matrix     further combinations of real runs, in every environment
    python3 scripts/dev/test.py chaos      every hostile trial (tests/chaos); last line: N passed, N failed, N skipped
    python3 scripts/dev/test.py cluster    every job of a real Slurm with two nodes (tests/cluster)

Every environment runs what can depend on SimpleTuner's release or its torch (tests/releases.py); what no release
decides runs once, as a part of its own. All parts side by side, since each training job uses one core. The output of a
part is shown as a whole when it is done.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITE = ("tests", "failures", "errors", "skipped")
"""What pytest's results count."""
SELECTIONS = {"": "not matrix and not chaos and not cluster", "matrix": "matrix", "chaos": "", "cluster": ""}
"""For pytest's ``-m``."""
PROGRAMS = {"chaos": ("gcc",), "cluster": ("slurmctld", "slurmd", "srun", "munged", "ip")}
"""What is installed where it is missing; for the others, all that any test needs."""
MOST_SECONDS = 3 * 3600
"""A part that takes longer hangs: it is interrupted, as by Ctrl-C, and fails with what it has come to."""
MOST_NAMED = 60
"""Failed tests of a part: more would fill the end of a log, and have one cause."""
LAST_SECONDS = 300
"""For a part that was interrupted to end what it started and to write its results."""


@dataclass(frozen=True)
class Part:
    """Tests that one pytest runs: in which environment, and which of them."""

    name: str
    folder: str
    marks: str

    @property
    def log(self) -> Path:
        return ROOT / ".cache" / f"tests-{self.slug}.txt"

    @property
    def results(self) -> Path:
        """Where pytest writes what became of each test."""
        return ROOT / ".cache" / f"tests-{self.slug}.xml"

    @property
    def temporary(self) -> Path:
        """For the files of its tests. pytest's own place is closed to other users at every start of another pytest, and
        some tests look at their files as another user."""
        return Path(tempfile.gettempdir()) / f"gh200-tests-{os.getpid()}-{self.slug}"

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "-")


def main(what: str) -> int:
    if what not in SELECTIONS:
        print(__doc__, file=sys.stderr)
        return 2
    install = ["sh", str(ROOT / "scripts" / "dev" / "install_test_programs.sh"), *PROGRAMS.get(what, ())]
    if subprocess.run(install).returncode:
        return 1
    built = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "dev" / "environments.py"), "test"], stdout=subprocess.PIPE, text=True
    )
    if built.returncode:
        return built.returncode
    environments = [(folder, version) for folder, version in map(str.split, built.stdout.splitlines())]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    variables["GH200_SLOW_TESTS"] = variables["GH200_NO_SKIPS"] = "1"
    variables["GH200_RELEASES"] = ",".join(version for _, version in environments)
    failed = []
    if not what and subprocess.run(["make", "--no-print-directory", "lint"], cwd=ROOT, env=variables).returncode:
        failed.append("lint")
    chosen = parts(environments, what)
    unwell = run_side_by_side(chosen, what, variables)
    failed += [f"tests on {part.name}" for part in unwell]
    ran = ", ".join(version for _, version in environments)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\nran against SimpleTuner {ran}, {(spent.ru_utime + spent.ru_stime) / 60:.1f} minutes of CPU: ", end="")
    print(f"FAILED: {'; '.join(failed)}" if failed else "all passed")
    print("".join(f"FAILED {line}\n" for part in unwell for line in failures(part)), end="")
    print(counted([part.results for part in chosen], [part.results for part in unwell]))
    return 1 if failed else 0


def parts(environments: list[tuple[str, str]], what: str) -> list[Part]:
    """One per environment, and one for what no release decides, in the first of them."""
    wanted = SELECTIONS[what]
    each = [
        Part(f"SimpleTuner {version}", folder, " and ".join(filter(None, (wanted, "releases"))))
        for folder, version in environments
    ]
    return [*each, Part("no release", environments[0][0], " and ".join(filter(None, (wanted, "not releases"))))]


def counted(files: list[Path], unwell: Collection[Path] = ()) -> str:
    """Over all environments. One in which no test ran has failed, as has one whose end tells of a failure that is none
    of a test: it was interrupted, or skipped what it must run.
    """
    total: Counter[str] = Counter()
    for path in files:
        tests, failures, errors, skipped = results_in(path)
        total["failed"] += idle(path) or (path in unwell and not failures + errors)
        total.update(failed=failures + errors, skipped=skipped, passed=tests - failures - errors - skipped)
    return f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped"


def idle(path: Path) -> bool:
    """No test ran: every one was skipped, or there was none, or pytest did not get as far as its results."""
    tests, _, _, skipped = results_in(path)
    return tests == skipped


def results_in(path: Path) -> list[int]:
    """As SUITE; zeros where there are none."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite")) if path.is_file() else []
    return [sum(int(suite.get(name, 0)) for suite in suites) for name in SUITE]


def failures(part: Part) -> list[str]:
    """What failed, by name, for the end of a log whose beginning may be cut off; where no test did, its last words."""
    cases = list(ElementTree.parse(part.results).getroot().iter("testcase")) if part.results.is_file() else []
    unwell = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    names = [f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in unwell[:MOST_NAMED]]
    if len(unwell) > MOST_NAMED:
        names.append(f"and {len(unwell) - MOST_NAMED} more")
    last = [line for line in part.log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return [f"on {part.name}: {words}" for words in names or [f"otherwise: {' '.join(last)}"]]


def run_side_by_side(chosen: list[Part], what: str, variables: dict[str, str]) -> list[Part]:
    """The parts that failed. While they run, a line a minute says so: silence looks like a hang."""
    (ROOT / ".cache").mkdir(exist_ok=True)
    running = {part: start(part, what, variables) for part in chosen}
    started = shown = time.monotonic()
    failed: list[Part] = []
    interrupted: set[Part] = set()
    while running:
        time.sleep(1)
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            names = ", ".join(part.name for part in running)
            print(f"... testing: {names}, {(shown - started) / 60:.0f} min", flush=True)
        for part, process in list(running.items()):
            if process.poll() is None:
                end_if_late(part, process, time.monotonic() - started, interrupted)
                continue
            del running[part]
            print(f"\n=== {part.name} ===\n{part.log.read_text(errors='replace')}", flush=True)
            if idle(part.results):
                print(f"... {part.name}: no test ran, so nothing has passed", flush=True)
            if process.returncode or idle(part.results):
                failed.append(part)
            else:
                shutil.rmtree(part.temporary, ignore_errors=True)
    return failed


def end_if_late(part: Part, process: subprocess.Popen[bytes], seconds: float, interrupted: set[Part]) -> None:
    """Interrupted once: then pytest ends what its tests started and writes its results. Killed if that hangs too."""
    if seconds > MOST_SECONDS + LAST_SECONDS:
        process.kill()
    elif seconds > MOST_SECONDS and part not in interrupted:
        interrupted.add(part)
        print(f"... {part.name} takes more than {MOST_SECONDS / 60:.0f} min: interrupted", flush=True)
        process.send_signal(signal.SIGINT)


def start(part: Part, what: str, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    part.results.unlink(missing_ok=True)
    command = [str(ROOT / part.folder / "bin" / "python"), "-m", "pytest", "-rs", "--durations=12"]
    command += [
        f"tests/{what}" if what in {"chaos", "cluster"} else "tests",
        f"--junitxml={part.results}",
        f"--basetemp={part.temporary}",
        "-m",
        part.marks,
    ]
    with part.log.open("w") as output:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    sys.exit(main("".join(sys.argv[1:])))
