"""Running the checks and writing the report a user can send: no secrets, no paths."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict, dataclass
from typing import Any

from simpletuner_gh200 import __version__
from simpletuner_gh200.config.environment import EMULATED, text
from simpletuner_gh200.diagnostics.check import Bench, Results, failed
from simpletuner_gh200.diagnostics.selftest import copies, device
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.telemetry.redact import redact
from simpletuner_gh200.units import counted
from simpletuner_gh200.upstream.source import installed_version

LIBRARIES = ("torch", "cuda-bindings", "numpy", "simpletuner")
CHECKS = (*device.CHECKS, *copies.CHECKS)

_PATH = re.compile(r"(?<![\w.])(?!/dev/shm(?![\w.+@/-]))(/[\w.+@-]+){2,}/?")
"""Of at least two folders. ``/dev/shm`` itself is on every machine."""


@dataclass(frozen=True)
class SelfTest(Results):
    device: dict[str, Any]
    emulated: bool

    @property
    def verdict(self) -> str:
        """In a few words: does this device do what the extension needs?"""
        if not self.ok:
            return f"{counted(self.counts['fail'], 'check')} failed"
        if self.device.get("mode") == "none":
            return "nothing failed, but there is no GPU to test"
        return "everything holds" + (" on an emulated device" if self.emulated else "")

    def to_json(self) -> dict[str, Any]:
        """What is printed, written and sent."""
        raw = {
            "version": __version__,
            "machine": {"system": platform.system(), "arch": platform.machine(), "python": platform.python_version()},
            "libraries": {name: installed_version(name) or "not installed" for name in LIBRARIES},
            "emulated": self.emulated,
            "device": self.device,
            "checks": [
                {"name": check.code, "what": check.what, "status": result.status, "found": result.found}
                for check, result in self.rows
            ],
            "summary": self.counts,
        }
        cleaned: dict[str, Any] = json.loads(without_paths(json.dumps(redact(raw))))
        return cleaned


def without_paths(text: str) -> str:
    """Paths tell names of people and projects; none is needed to understand a report."""
    return _PATH.sub("<path>", text)


def selftest(driver: Driver, *, ordinal: int = 0) -> SelfTest:
    """Run every check on one device."""
    bench = Bench(driver, ordinal, emulated=bool(text(EMULATED)))
    rows = tuple((check, check.result(bench, lambda what: failed(what, ""))) for check in CHECKS)
    return SelfTest(rows, asdict(bench.caps), bench.emulated)
