"""Our routes in SimpleTuner's server, behind the same door as its own."""

from __future__ import annotations

import html
import importlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.form import form_problems, our_values
from simpletuner_gh200.seams.web_ui.fields import values_for_page
from simpletuner_gh200.seams.web_ui.panel import (
    COMMAND,
    Panel,
    environment,
    opened_configuration,
    output_folder,
    output_of,
)

PREFIX = "/api/gh200"
_SERVICES = "simpletuner.simpletuner_sdk.server.services"


def router() -> Any:
    """A FastAPI router; where the release knows users, each route asks who is there."""
    from fastapi import APIRouter, HTTPException
    from fastapi.responses import HTMLResponse

    panel = Panel()
    made = APIRouter(prefix=PREFIX, tags=["gh200"], dependencies=_same_door())

    def state() -> dict[str, Any]:
        output, working = _job()
        return panel.state(_opened(), output, working=working)

    def start(what: str) -> dict[str, Any]:
        opened = _opened()
        if what == "plan":
            if opened is None:
                raise HTTPException(status_code=409, detail="no configuration is open: choose one, or save this one")
            panel.start_plan(opened)
        elif what == "doctor":
            panel.start_doctor()
        else:
            raise HTTPException(status_code=404, detail=f"{what!r}: there is doctor, and there is plan")
        return state()

    def report() -> Any:
        opened, (output, _working) = _opened(), _job()
        try:
            output = output or (output_of(opened) if opened else None)
        except OSError as unreadable:
            why = f"{opened} cannot be read: {unreadable.strerror or unreadable}"
            raise HTTPException(status_code=409, detail=why) from unreadable
        if output is None:
            raise HTTPException(status_code=409, detail="no configuration with an output_dir is open")
        done, page = _report(output)
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


def _opened() -> Path | None:
    return opened_configuration(importlib.import_module(f"{_SERVICES}.training_service").get_config_store())


_OVER = ("completed", "success", "failed", "error", "fatal", "crashed", "cancelled", "stopped", "terminated", "idle")
"""What upstream's states of a job are called once nothing more comes of it; while it works, they may be any words."""


def _job() -> tuple[Path | None, bool]:
    """The output folder of the job that the server runs, or ran last, and whether it still does."""
    state = importlib.import_module("simpletuner.simpletuner_sdk.api_state").APIState
    status = str(state.get_state("training_status") or "").lower()
    return (output_folder(state.get_state("training_config") or {}), status not in _OVER) if status else (None, False)


def _report(output: Path) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        command = [*COMMAND, "report", os.path.abspath(output), "--output", str(page)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, errors="replace")
        return not done.returncode, f"<pre>{html.escape(done.stderr)}</pre>" if done.returncode else page.read_text()
