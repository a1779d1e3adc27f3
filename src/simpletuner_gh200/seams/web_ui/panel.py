"""The panel on the hardware page: the doctor's verdict, the plan of what is open, the numbers of what runs."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simpletuner_gh200.seams.web_ui.background import BackgroundCommand
from simpletuner_gh200.telemetry.reading import FILE
from simpletuner_gh200.telemetry.view import RunView


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
