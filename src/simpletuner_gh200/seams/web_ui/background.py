"""Commands of ours that the server runs in processes of their own: started, asked about, never waited for."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
import time
from typing import Any

from simpletuner_gh200.config.environment import SWITCH, for_child

COMMAND = (sys.executable, "-m", "simpletuner_gh200")


def environment() -> dict[str, str]:
    """For the child, which only looks: with the variable, it would take itself for a process of SimpleTuner's."""
    return for_child({}, without=(SWITCH,))


class BackgroundCommand:
    """``gh200 NAME ... --json``, one at a time. Safe in threads: every open page asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._begun = 0.0
        self._state: dict[str, Any] = {"state": "idle"}
        atexit.register(self.stop)

    def start(self, *arguments: str) -> bool:
        """Start it, unless it runs already; was it?"""
        with self._lock:
            if self._state["state"] == "running":
                return False
            self._process = subprocess.Popen(
                [*COMMAND, *arguments, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(),
                text=True,
                errors="replace",
            )
            self._begun, self._state = time.monotonic(), {"state": "running"}
        threading.Thread(target=self._wait, args=(self._process,), name="gh200-command", daemon=True).start()
        return True

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def state(self) -> dict[str, Any]:
        """``state``: idle, running, done or failed; with ``seconds``, ``document`` or ``message``."""
        with self._lock:
            running = self._state["state"] == "running"
            return {**self._state, "seconds": round(time.monotonic() - self._begun, 1)} if running else self._state

    def _wait(self, process: subprocess.Popen[str]) -> None:
        output, errors = process.communicate()
        lines = output.splitlines()
        try:
            document = json.loads(lines[-1]) if lines else None
        except ValueError:
            document = None
        with self._lock:
            # Exit 1 is a verdict too: something does not fit, or a check failed. A refusal gives its reason instead.
            verdict = isinstance(document, dict) and "reason" not in document
            if verdict and process.returncode in (0, 1):
                self._state = {"state": "done", "document": document}
            else:
                message = errors.strip() or f"ended with exit code {process.returncode}"
                self._state = {"state": "failed", "message": message}
