"""Where ``make`` runs the tests, it has installed what they need: a skip fails the run, but for those named here.

Who calls pytest himself just sees fewer tests run without a browser, a shell or a compiler.
"""

from __future__ import annotations

import os

import pytest

NONE_ELSE = os.environ.get("GH200_NO_SKIPS") == "1"
ALLOWED = {
    "tests/chaos/test_chaos_limits.py::test_a_full": "this container forbids namespaces",
    "tests/chaos/test_chaos_limits.py::test_no_more_processes": "root's processes are not counted",
    "tests/chaos/test_chaos_neighbours.py": "only root can play another user",
    "tests/cluster/": "this container forbids namespaces",
    "tests/gpu/": "no CUDA device",
    "tests/integration/test_cache_other_kinds.py": "this release has no grounding cache",
    "tests/integration/test_fsdp2_training.py": "SimpleTuner 3 trains no tiny Flux under FSDP2",
    "tests/unit/memory/test_memory_numa.py": "this container forbids memory policies",
    "tests/unit/held/test_held_staging.py": "this file system does not tell what is in the page cache",
}
"""Where, and a part of the reason."""

unexpected: list[str] = []


def allowed(test: str, reason: str) -> bool:
    return any(test.startswith(place) and why in reason for place, why in ALLOWED.items())


def note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not allowed(report.nodeid, reason):
        unexpected.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    note(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if NONE_ELSE and unexpected and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if NONE_ELSE and unexpected:
        terminalreporter.section("skipped, but must run (tests/skips.py)")
        for line in unexpected:
            terminalreporter.line(line)
