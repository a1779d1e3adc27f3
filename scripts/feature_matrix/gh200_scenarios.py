"""The extension alone: the diagnostic, the contract, and one run with everything on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.feature_matrix.matrix import Row, Skip, attempt
from scripts.feature_matrix.runs import Bench
from simpletuner_gh200.operate.launching import accelerator_present

SCRIPT = "scripts/test_gh200_features.sh"
DIAGNOSTIC = Path(__file__).parents[2] / "gh200_diagnostic.py"
VALIDATION = Path(__file__).parents[2] / "validate_uvm.py"
STEPS = 24
NOTES = (
    "the guides' validate_uvm.py is `gh200 selftest`; placement and oversubscription are checks of gh200 doctor, too",
)


class GH200Scenarios:
    """The demo is the run; its summary serves four rows."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def rows(self, wanted: set[str]) -> Iterator[Row]:
        if "diagnostic" in wanted:
            yield attempt("G1", "diagnostic", f"{SCRIPT} --diagnostic", self._diagnostic)
            yield attempt("G2", "UVM on the device", f"{SCRIPT} --diagnostic", self._device)
            yield attempt("G9", "self-test of the memory room", "./validate_uvm.py", self._selftest)
        if "features" in wanted:
            yield attempt("G3", "contract with SimpleTuner", "gh200 upstream check", self._contract)
            yield attempt("G4", "seams in a run", "gh200 demo", self._seams)
            yield attempt("G5", "in-memory dataset", "gh200 demo", self._store)
            yield attempt("G6", "unified caches", "gh200 demo", self._caches)
            yield attempt("G7", "batch ramp", "gh200 demo", self._ramp)
            yield attempt("G8", "placement hints", "gh200 demo", self._hints)

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

    def _selftest(self) -> str:
        """Capabilities, advice, slabs, copies and failures, on the device itself."""
        if not accelerator_present():
            raise Skip("no GPU: on emulated machines a checkout runs it with `make selftest`")
        report = self._bench.folder / "gh200_selftest_report.json"
        done = _command([str(VALIDATION), "--json", "--output", str(report)], self._bench.folder)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        failed = [f"{check['name']}: {check['found']}" for check in found["checks"] if check["status"] == "fail"]
        assert done.returncode == 0 and not failed, "; ".join(failed) or done.stderr.strip()[-300:]
        return f"{sum(check['status'] == 'pass' for check in found['checks'])} checks pass"

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
        # The pages' seams are the server's: no run imports their modules.
        missing = {
            name: status
            for name, status in wrong.items()
            if "not in this SimpleTuner" not in status and not name.startswith("web_ui")
        }
        assert not missing, f"seams not installed: {missing}"
        assert self._demo["global_step"] == STEPS, f"reached step {self._demo['global_step']}"
        return f"{len(self._demo['seams']) - len(wrong)} seams installed, {STEPS} steps"

    def _store(self) -> str:
        (found,) = self._details("store").values()
        assert found["served"] > 0, f"nothing was read from memory: {found}"
        assert found["mismatches"] == 0, f"{found['mismatches']} reads differed from their checksum"
        return f"{found['files']} files staged, {found['served']} reads from memory"

    def _caches(self) -> str:
        found = [cache for cache in self._details("caches").values() if isinstance(cache, dict) and "hits" in cache]
        unused = [cache for cache in found if cache["hits"] + cache["batched"] == 0]
        assert found, "no cache was served"
        assert not unused, f"a cache had no hit: {unused}"
        return f"{len(found)} caches, {sum(cache['hits'] + cache['batched'] for cache in found)} hits"

    def _ramp(self) -> str:
        windows = self._details("ramp")["windows"]
        assert windows[-1] > windows[0], f"the windows did not grow: {windows}"
        return f"windows of {windows[0]} to {windows[-1]} micro-batches"

    def _hints(self) -> str:
        found = self._details("hints")
        if not accelerator_present():
            raise Skip(f"{found['tensors_not_helped']} tensors recognised, but there is no GPU to place them on")
        assert found["tensors_helped"] > 0, f"no tensor was placed: {found['why_not']}"
        return f"{found['tensors_helped']} tensors placed"

    def _details(self, name: str) -> dict[str, Any]:
        status = self._demo["features"].get(name)
        assert status == "on", f"{name} is {status}"
        details: dict[str, Any] = self._demo["cache" if name == "caches" else name]
        return details


def _command(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
