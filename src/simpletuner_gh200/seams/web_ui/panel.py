"""The panel on the hardware page: the doctor's verdict, the plan of what is open, the numbers of what runs.

Commands of ours run in processes of their own: started, asked about, never waited for.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import SWITCH, for_child
from simpletuner_gh200.telemetry.reading import FILE
from simpletuner_gh200.telemetry.view import RunView

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


class Panel:
    """What the page asks for. ``opened``: the open configuration's file."""

    def __init__(self) -> None:
        self.doctor = BackgroundCommand()
        self.plan = BackgroundCommand()
        self._planned: str | None = None
        self._reports = tempfile.TemporaryDirectory(prefix="gh200-doctor-")

    def start_doctor(self) -> None:
        self.doctor.start("doctor", "--skip-allocation", "--output", os.path.join(self._reports.name, "report.json"))

    def start_plan(self, opened: Path) -> None:
        """Unless one is being made: the name shown stays that of the configuration it is made of."""
        if self.plan.start("plan", str(opened)):
            self._planned = opened.parent.name if opened.name == "config.json" else opened.stem

    def state(self, opened: Path | None, output: Path | None, *, working: bool) -> dict[str, Any]:
        """``output``: of the job that the server runs, or ran last; ``working``: whether it still does."""
        return {
            "opened": str(opened) if opened else None,
            "doctor": self.doctor.state(),
            "plan": {**self.plan.state(), "of": self._planned},
            "job": live_numbers(output) if output else None,
            "working": working,
        }


def live_numbers(output: Path) -> dict[str, Any] | None:
    """The run below a folder as it is now, in rows of titles and texts; None while nothing is recorded."""
    try:
        view = RunView.glance(output)
    except OSError as unreadable:
        why = f"{output / FILE} cannot be read: {unreadable.strerror or unreadable}"
        return {"status": why, "rows": [], "alerts": []}
    if view is None:
        return None
    (_status, words), *progress = view.progress()
    alerts = [asdict(alert) for alert in view.alerts()] if not view.run.end else []
    return {"status": words, "rows": [*progress, *view.latest()], "alerts": alerts}


def opened_configuration(store: Any) -> Path | None:
    """The file of the configuration that is open in the page."""
    name = store.get_active_config()
    path = Path(store._get_config_path(name)) if name else None
    return path if path is not None and os.path.isfile(path) else None


def output_folder(config: Mapping[str, Any]) -> Path | None:
    found = config.get("--output_dir") or config.get("output_dir")
    return Path(str(found)) if found else None


def output_of(opened: Path) -> Path | None:
    """Where runs of a configuration file go. Raises OSError where it cannot be read."""
    try:
        config = json.loads(opened.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return output_folder(config) if isinstance(config, dict) else None
