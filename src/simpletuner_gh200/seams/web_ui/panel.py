"""The panel on the hardware page, and our routes in SimpleTuner's server, behind the same door as its own.

The panel shows the doctor's verdict, the plan of what is open, the numbers of what runs. Commands of ours run in
processes of their own: started, asked about, never waited for.
"""

from __future__ import annotations

import atexit
import html
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import SWITCH, for_child
from simpletuner_gh200.config.form import form_problems, our_values
from simpletuner_gh200.seams.web_ui.fields import values_for_page
from simpletuner_gh200.telemetry.reading import FILE
from simpletuner_gh200.telemetry.view import RunView

COMMAND = (sys.executable, "-m", "simpletuner_gh200")
PREFIX = "/api/gh200"
_SERVICES = "simpletuner.simpletuner_sdk.server.services"
_OVER = ("completed", "success", "failed", "error", "fatal", "crashed", "cancelled", "stopped", "terminated", "idle")
"""What upstream's states of a job are called once nothing more comes of it; while it works, they may be any words."""


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


def output_of(opened: Path | None) -> Path | None:
    """Where runs of a configuration file go. Raises OSError where it cannot be read."""
    try:
        return _output_in(json.loads(opened.read_text(encoding="utf-8"))) if opened is not None else None
    except ValueError:
        return None


def _output_in(config: Any) -> Path | None:
    found = (config.get("--output_dir") or config.get("output_dir")) if isinstance(config, dict) else None
    return Path(str(found)) if found else None


def opened_configuration() -> Path | None:
    """The file of the configuration that is open in the page."""
    store = importlib.import_module(f"{_SERVICES}.training_service").get_config_store()
    name = store.get_active_config()
    path = Path(store._get_config_path(name)) if name else None
    return path if path is not None and path.is_file() else None


def job() -> tuple[Path | None, bool]:
    """The output folder of the job that the server runs, or ran last, and whether it still does."""
    state = importlib.import_module("simpletuner.simpletuner_sdk.api_state").APIState
    status = str(state.get_state("training_status") or "").lower()
    return (_output_in(state.get_state("training_config")), status not in _OVER) if status else (None, False)


def router() -> Any:
    """A FastAPI router; where the release knows users, each route asks who is there."""
    from fastapi import APIRouter, HTTPException
    from fastapi.responses import HTMLResponse

    panel = Panel()
    made = APIRouter(prefix=PREFIX, tags=["gh200"], dependencies=_same_door())

    def state() -> dict[str, Any]:
        output, working = job()
        return panel.state(opened_configuration(), output, working=working)

    def start(what: str) -> dict[str, Any]:
        if what == "plan":
            opened = opened_configuration()
            if opened is None:
                raise HTTPException(status_code=409, detail="no configuration is open: choose one, or save this one")
            panel.start_plan(opened)
        elif what == "doctor":
            panel.start_doctor()
        else:
            raise HTTPException(status_code=404, detail=f"{what!r}: there is doctor, and there is plan")
        return state()

    def report() -> Any:
        opened, (output, _working) = opened_configuration(), job()
        try:
            output = output or output_of(opened)
        except OSError as unreadable:
            why = f"{opened} cannot be read: {unreadable.strerror or unreadable}"
            raise HTTPException(status_code=409, detail=why) from unreadable
        if output is None:
            raise HTTPException(status_code=409, detail="no configuration with an output_dir is open")
        done, page = report_page(output)
        return HTMLResponse(page, status_code=200 if done else 404)

    def fields(config: dict[str, Any]) -> dict[str, Any]:
        """A configuration that somebody wrote as text: what is ours in it, and what our fields show for it."""
        ours = our_values(config)
        problems = [str(problem) for problem in form_problems(ours)]
        return {"ours": ours, "problems": problems, "fields": {} if problems else values_for_page(config)}

    made.add_api_route("/fields", fields, methods=["POST"])
    made.add_api_route("/panel", state, methods=["GET"])
    made.add_api_route("/start/{what}", start, methods=["POST"])
    made.add_api_route("/report", report, methods=["GET"])
    return made


def _same_door() -> list[Any]:
    """What SimpleTuner's own routes depend on; nothing on releases that know no users."""
    from fastapi import Depends

    try:
        middleware = importlib.import_module(f"{_SERVICES}.cloud.auth.middleware")
    except ModuleNotFoundError:
        return []
    return [Depends(middleware.get_current_user)]


def report_page(output: Path) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        command = [*COMMAND, "report", os.path.abspath(output), "--output", str(page)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, errors="replace")
        return not done.returncode, f"<pre>{html.escape(done.stderr)}</pre>" if done.returncode else page.read_text()
