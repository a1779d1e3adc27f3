"""Running the checks and writing the report a user can send: no secrets, no paths."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from simpletuner_gh200 import __version__
from simpletuner_gh200.config.environment import EMULATED, text
from simpletuner_gh200.diagnostics.selftest import copies, device
from simpletuner_gh200.diagnostics.selftest.check import Bench, Failed, SelfCheck, Skipped
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.telemetry.redact import redact
from simpletuner_gh200.units import counted

RowStatus = Literal["pass", "fail", "skip"]

CHECKS = (*device.CHECKS, *copies.CHECKS)

_PATH = re.compile(r"(?<![\w.])(?!/dev/shm(?![\w.+@/-]))(/[\w.+@-]+){2,}/?")
"""Of at least two folders. ``/dev/shm`` itself is on every machine."""


@dataclass(frozen=True)
class CheckRow:
    name: str
    what: str
    status: RowStatus
    found: str


@dataclass(frozen=True)
class SelfTest:
    rows: tuple[CheckRow, ...]
    device: dict[str, Any]
    measured: dict[str, float]
    emulated: bool

    def count(self, status: RowStatus) -> int:
        return sum(row.status == status for row in self.rows)

    @property
    def ok(self) -> bool:
        return self.count("fail") == 0

    @property
    def verdict(self) -> str:
        """In a few words: does this device do what the extension needs?"""
        if not self.ok:
            return f"{counted(self.count('fail'), 'check')} failed"
        if self.device.get("mode") == "none":
            return "nothing failed, but there is no GPU to test"
        return "everything holds" + (" on an emulated device" if self.emulated else "")

    def skipped_in_words(self) -> str:
        """What could not be tried, by its reason; empty where everything was."""
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            if row.status == "skip":
                reasons.setdefault(row.found.removeprefix("there is "), []).append(row.name)
        reported = "; ".join(f"{reason} ({', '.join(_by_group(names))})" for reason, names in reasons.items())
        return f"{self.count('skip')} skipped: {reported}" if reported else ""

    @property
    def closing_line(self) -> str:
        return f"{self.count('pass')} passed, {self.count('fail')} failed, {self.count('skip')} skipped"

    def to_json(self) -> dict[str, Any]:
        """What is printed, written and sent."""
        raw = {
            "version": __version__,
            "machine": {"system": platform.system(), "arch": platform.machine(), "python": platform.python_version()},
            "libraries": _libraries(),
            "emulated": self.emulated,
            "device": self.device,
            "measured": self.measured,
            "checks": [asdict(row) for row in self.rows],
            "summary": {"pass": self.count("pass"), "fail": self.count("fail"), "skip": self.count("skip")},
        }
        cleaned: dict[str, Any] = json.loads(without_paths(json.dumps(redact(raw))))
        return cleaned


def _by_group(names: Sequence[str]) -> list[str]:
    """``advice.prefetch`` and nine more of its group as ``advice (10)``."""
    groups = Counter(name.partition(".")[0] for name in names)
    return [f"{group} {number}" if number > 1 else group for group, number in groups.items()]


def without_paths(text: str) -> str:
    """Paths tell names of people and projects; none is needed to understand a report."""
    return _PATH.sub("<path>", text)


def selftest(driver: Driver, *, ordinal: int = 0) -> SelfTest:
    """Run every check on one device."""
    bench = Bench(driver, ordinal, emulated=bool(text(EMULATED)))
    rows = tuple(_run(check, bench) for check in CHECKS)
    return SelfTest(rows, asdict(bench.caps), bench.measured, bench.emulated)


def _run(check: SelfCheck, bench: Bench) -> CheckRow:
    try:
        return CheckRow(check.name, check.what, "pass", check.run(bench))
    except Skipped as skipped:
        return CheckRow(check.name, check.what, "skip", str(skipped))
    except Failed as failed:
        return CheckRow(check.name, check.what, "fail", str(failed))
    except (GH200Error, RuntimeError, OSError, ValueError) as broken:
        return CheckRow(check.name, check.what, "fail", f"{type(broken).__name__}: {broken}")


def _libraries() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "cuda-bindings", "numpy", "simpletuner"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_report(result: SelfTest, path: Path, measured: Mapping[str, Any] | None = None) -> None:
    """``measured``: what ``--bench`` found besides."""
    path.write_text(json.dumps({**result.to_json(), **(measured or {})}, indent=2) + "\n")
