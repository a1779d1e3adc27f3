"""Commands of ours that the server runs beside itself: started, asked how they are doing, never waited for."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from simpletuner_gh200.config.environment import SWITCH, for_child

COMMAND = (sys.executable, "-m", "simpletuner_gh200")


class BackgroundCommand:
    """``gh200 NAME ... --json`` in a process of its own; one at a time. Safe in threads: every open page asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._written: tuple[IO[bytes], IO[bytes]] | None = None
        """Standard output and errors; files, since nobody reads pipes meanwhile."""
        self._begun = 0.0
        self._ended: dict[str, Any] | None = None
        atexit.register(self.stop)

    def start(self, *arguments: str) -> bool:
        """Start it, unless it runs already; was it?"""
        with self._lock:
            if self._state()["state"] == "running":
                return False
            self._start(arguments)
            return True

    def _start(self, arguments: Sequence[str]) -> None:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._written = output, errors
        self._begun, self._ended = time.monotonic(), None
        # The child only looks: with the variable, it would take itself for a process of SimpleTuner's.
        environment = for_child({}, without=(SWITCH,))
        self._process = subprocess.Popen(
            [*COMMAND, *arguments, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
        )

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def state(self) -> dict[str, Any]:
        """``state``: idle, running, done or failed; with ``seconds``, ``document`` or ``message``."""
        with self._lock:
            return self._state()

    def _state(self) -> dict[str, Any]:
        if self._process is None:
            return {"state": "idle"}
        if self._process.poll() is None:
            return {"state": "running", "seconds": round(time.monotonic() - self._begun, 1)}
        if self._ended is None:
            self._ended = self._result()
        return self._ended

    def _result(self) -> dict[str, Any]:
        assert self._process is not None and self._written is not None
        output, errors = map(_text, self._written)
        lines = output.splitlines()
        # Exit 1 is a verdict too: something does not fit, or a check failed.
        try:
            document = json.loads(lines[-1]) if lines else None
        except ValueError:
            document = None
        if isinstance(document, dict) and self._process.returncode in (0, 1):
            return {"state": "done", "document": document}
        return {"state": "failed", "message": errors or f"ended with exit code {self._process.returncode}"}


def _text(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace").strip()
