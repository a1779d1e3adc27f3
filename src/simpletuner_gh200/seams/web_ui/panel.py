"""The panel on the hardware page: the doctor's verdict, the plan of what is open, the numbers of what runs."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simpletuner_gh200.seams.web_ui.background import BackgroundCommand
from simpletuner_gh200.telemetry.reading import FILE, dig, parse_line
from simpletuner_gh200.units import format_bytes, format_seconds

TAIL = 1 << 16
"""Bytes at the end of a run's telemetry that surely hold its last step."""

_TIMES = (
    ("step time", "step_seconds"),
    ("waiting for data", "data_wait_seconds"),
    ("compute", "compute_seconds"),
    ("other", "other_seconds"),
)
_BYTES = (
    ("process memory", "host/resident"),
    ("available memory", "host/available"),
    ("slabs", "slab_bytes"),
    ("HBM used", "device/used"),
)


class Panel:
    """What the page asks for. ``opened``: the open configuration's file; ``running``: the output folder of a job."""

    def __init__(self) -> None:
        self.doctor = BackgroundCommand()
        self.plan = BackgroundCommand()
        self._planned: str | None = None
        self._reports: tempfile.TemporaryDirectory[str] | None = None
        self._making = threading.Lock()

    def start_doctor(self) -> None:
        with self._making:
            self._reports = self._reports or tempfile.TemporaryDirectory(prefix="gh200-doctor-")
        report = os.path.join(self._reports.name, "report.json")
        self.doctor.start("doctor", "--skip-allocation", "--output", report)

    def start_plan(self, opened: Path) -> None:
        """Unless one is being made: the name shown stays that of the configuration it is made of."""
        if self.plan.start("plan", str(opened)):
            self._planned = opened.parent.name if opened.name == "config.json" else opened.stem

    def state(self, opened: Path | None, running: Path | None) -> dict[str, Any]:
        return {
            "opened": str(opened) if opened else None,
            "doctor": self.doctor.state(),
            "plan": {**self.plan.state(), "of": self._planned},
            "job": live_numbers(running) if running else None,
        }


def live_numbers(output: Path) -> dict[str, Any] | None:
    """The last step of the run below a folder, as titles and texts; None while there is none."""
    try:
        record = last_step(output / FILE)
    except OSError as unreadable:
        return {"rows": [(f"{output / FILE} cannot be read", unreadable.strerror or str(unreadable))]}
    if record is None:
        return None
    rows = [("optimizer step", str(record.get("step")))]
    rows += [(title, format_seconds(dig(record, name))) for title, name in _TIMES if dig(record, name) is not None]
    rows += [(f"{name.removesuffix('/hit_rate')} hits", f"{rate:.1%}") for name, rate in hit_rates(record)]
    rows += [(title, format_bytes(dig(record, name))) for title, name in _BYTES if dig(record, name)]
    return {"rows": rows}


def last_step(telemetry: Path) -> dict[str, Any] | None:
    try:
        with telemetry.open("rb") as file:
            file.seek(max(0, telemetry.stat().st_size - TAIL))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    records = (parse_line(line) for line in reversed(lines) if line.strip())
    return next((record for record in records if record and record.get("kind") == "step"), None)


def hit_rates(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(cache, share) of every cache in a step's record."""
    for name, value in _leaves("", record.get("features") or {}):
        if name.endswith("hit_rate") and "expected" not in name and isinstance(value, int | float):
            yield name.lstrip("/"), float(value)


def _leaves(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(f"{prefix}/{name}", value)
        else:
            yield f"{prefix}/{name}", value


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
