"""``make selftest``: the checks of ``gh200 selftest`` on every emulated machine, with NVIDIA's bindings of both majors.

The last line is ``N passed, N failed, N skipped`` over all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

from tests.emulator.emulation import cuda12_site, environment, installed_runtime

EXPECTED: dict[str, dict[str, Any]] = {
    "gh200": {"mode": "numa", "concurrent_managed": True, "host_page_tables": True, "direct_managed_from_host": True},
    "cdmm": {"mode": "cdmm", "concurrent_managed": True, "host_page_tables": True, "direct_managed_from_host": True},
    "gb10": {"mode": "single pool", "integrated": True, "host_page_tables": True, "direct_managed_from_host": False},
    "pcie": {"mode": "discrete", "concurrent_managed": True, "pageable_access": False, "host_page_tables": False},
    "hmm": {"mode": "discrete", "concurrent_managed": True, "pageable_access": True, "host_page_tables": False},
    "legacy": {"mode": "discrete", "concurrent_managed": False, "pageable_access": False},
}
COMMAND = [sys.executable, "-c", "from simpletuner_gh200.cli.main import main; main()", "selftest", "--json"]


def main() -> int:
    totals: Counter[str] = Counter()
    for name in EXPECTED:
        for cuda12 in (False, True):
            totals.update(_run(name, cuda12=cuda12))
    print(f"{totals['pass']} passed, {totals['fail']} failed, {totals['skip']} skipped")
    return 1 if totals["fail"] else 0


def _run(name: str, *, cuda12: bool) -> Counter[str]:
    title = f"{name}, bindings {'12' if cuda12 else '13'}"
    if cuda12 and not cuda12_site().exists():
        print(f"skip  {title}: the bindings are not installed; `make selftest` does it")
        return Counter(skip=1)
    report = _report(name, cuda12=cuda12)
    if isinstance(report, str):
        print(f"FAIL  {title}: {report}")
        return Counter(fail=1)
    rows = [(row["status"], row["name"], row["found"]) for row in report["checks"]]
    rows.append(_identity(name, report["device"]))
    for status, check, found in rows:
        if status != "pass":
            print(f"{status if status == 'skip' else status.upper()}  {title}: {check}: {found}")
    counted = Counter(status for status, _, _ in rows)
    print(f"      {title}: {counted['pass']} passed, {counted['fail']} failed, {counted['skip']} skipped")
    return counted


def _report(name: str, *, cuda12: bool) -> dict[str, Any] | str:
    surroundings = environment(cuda12=cuda12, torch_runtime=installed_runtime(), personality=name)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(COMMAND, env=surroundings, capture_output=True, text=True, cwd=folder, timeout=1800)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return f"no report, exit code {done.returncode}: {done.stderr[-1500:]}"
    return found


def _identity(name: str, device: dict[str, Any]) -> tuple[str, str, str]:
    """Is the machine we were told about the one that was emulated?"""
    wrong = {key: device[key] for key, value in EXPECTED[name].items() if device[key] != value}
    return ("fail" if wrong else "pass", f"personality.{name}", f"found {wrong}" if wrong else "as emulated")


if __name__ == "__main__":
    sys.exit(main())
