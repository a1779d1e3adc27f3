"""How a process that only has the extension in it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROCESS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from simpletuner_gh200.seams import bootstrap

told = threading.Event()
runtime = SimpleNamespace(close=told.set, outcome=SimpleNamespace(status=sys.argv[1]))
bootstrap._close_at_exit(runtime)
assert "torch" not in sys.modules
pool = ThreadPoolExecutor(1)
pool.submit(lambda: print("told to stop" if told.wait(float(sys.argv[2])) else "left alone"))
"""


@pytest.mark.parametrize(
    ("status", "seconds", "expected"),
    [("completed", 20, "told to stop"), ("not started", 20, "told to stop"), ("training", 0.1, "left alone")],
)
def test_quiet_work_is_stopped_before_python_waits_for_it(status: str, seconds: float, expected: str) -> None:
    command = [sys.executable, "-c", PROCESS, status, str(seconds)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == expected
