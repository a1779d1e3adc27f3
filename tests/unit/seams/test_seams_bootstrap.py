"""How a process that only has the extension in it ends."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from simpletuner_gh200.seams import bootstrap

PROCESS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from simpletuner_gh200.seams import bootstrap

told = threading.Event()
runtime = SimpleNamespace(close=told.set, outcome=SimpleNamespace(status="completed"))
bootstrap._close_at_exit(runtime)
assert "torch" not in sys.modules
pool = ThreadPoolExecutor(1)
pool.submit(lambda: print("told to stop" if told.wait(20) else "left alone"))
"""


def test_quiet_work_is_stopped_before_python_waits_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "told to stop"


def test_what_still_trains_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, closed = [], []
    runtime = SimpleNamespace(close=lambda: closed.append(True), outcome=SimpleNamespace(status="training"))
    monkeypatch.setattr(bootstrap.threading, "_register_atexit", hooks.append)
    monkeypatch.setattr(bootstrap.atexit, "register", hooks.append)
    bootstrap._close_at_exit(runtime)  # type: ignore[arg-type]
    at_exit, early = hooks
    early()
    assert not closed
    at_exit()
    assert closed
