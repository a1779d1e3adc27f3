"""The extension alone: the diagnostic, the contract, and one run with everything on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from matrix import Row, Skip, attempt
from runs import Bench

from simpletuner_gh200.operate.launching import accelerator_present

SCRIPT = "scripts/test_gh200_features.sh"
DIAGNOSTIC = Path(__file__).parents[2] / "gh200_diagnostic.py"
STEPS = 8
NOTES = (
    "the guides' validate_uvm.py is part of the diagnostic: placement and oversubscription are checks of gh200 doctor",
)


class GH200Scenarios:
    """The demo is the run; its summary serves four rows."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def rows(self, wanted: set[str]) -> Iterator[Row]:
        if "diagnostic" in wanted:
            yield attempt("G1", "diagnostic", f"{SCRIPT} --diagnostic", self._diagnostic)
            yield attempt("G2", "UVM on the device", f"{SCRIPT} --diagnostic", self._device)
        if "features" in wanted:
            yield attempt("G3", "contract with SimpleTuner", "gh200 upstream check", self._contract)
            yield attempt("G4", "seams in a run", "gh200 demo", self._seams)
            yield attempt("G5", "in-memory dataset", "gh200 demo", lambda: self._feature("store"))
            yield attempt("G6", "unified caches", "gh200 demo", lambda: self._feature("caches"))
            yield attempt("G7", "batch ramp", "gh200 demo", lambda: self._feature("ramp"))
            yield attempt("G8", "placement hints", "gh200 demo", lambda: self._feature("hints"))

    @cached_property
    def _report(self) -> dict[str, Any]:
        target = self._bench.folder / "gh200_diagnostic_report.json"
        done = _command([str(DIAGNOSTIC), "--output", str(target)], self._bench.folder)
        if not target.is_file():
            raise RuntimeError(f"no report (exit code {done.returncode}): {done.stderr.strip()[-300:]}")
        report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return report

    def _diagnostic(self) -> str:
        failed = [f"{check['code']} {check['what']}: {check['found']}" for check in self._checks("fail")]
        assert not failed, "; ".join(failed)
        return f"{len(self._checks('pass'))} checks pass, {len(self._checks('skip'))} need hardware this machine lacks"

    def _device(self) -> str:
        if not accelerator_present():
            raise Skip("no GPU: placement, bandwidth and oversubscription are measured on a device or not at all")
        return self._diagnostic()

    def _checks(self, status: str) -> list[dict[str, Any]]:
        return [check for check in self._report["checks"] if check["status"] == status]

    def _contract(self) -> str:
        done = _command(["-m", "simpletuner_gh200", "upstream", "check", "--json"], self._bench.folder)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        broken = [row["name"] for row in found["seams"] if row["status"] == "broken"]
        assert found["ok"], f"broken seams: {broken}"
        return f"SimpleTuner {found['version']}: {len(found['seams'])} seams hold"

    @cached_property
    def _demo(self) -> dict[str, Any]:
        folder = str(self._bench.folder / "demo")
        done = _command(
            ["-m", "simpletuner_gh200", "demo", "--folder", folder, "--steps", str(STEPS), "--json"], self._bench.folder
        )
        if done.returncode != 0:
            raise RuntimeError(f"gh200 demo: exit code {done.returncode}: {done.stderr.strip()[-400:]}")
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    def _seams(self) -> str:
        wrong = {name: status for name, status in self._demo["seams"].items() if status != "ok"}
        missing = {name: status for name, status in wrong.items() if "not in this SimpleTuner" not in status}
        assert not missing, f"seams not installed: {missing}"
        assert self._demo["global_step"] == STEPS, f"reached step {self._demo['global_step']}"
        return f"{len(self._demo['seams']) - len(wrong)} seams installed, {STEPS} steps"

    def _feature(self, name: str) -> str:
        status = self._demo["features"].get(name)
        assert status == "on", f"{name} is {status}"
        facts = json.dumps(self._demo.get(name, {}), default=str)
        return facts if len(facts) <= 160 else facts[:157] + "..."


def _command(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
