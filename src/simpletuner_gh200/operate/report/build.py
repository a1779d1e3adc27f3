"""From a run's folder to its report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.report.page import page
from simpletuner_gh200.telemetry.reading import read_run

DOCTOR_FILE = "gh200_diagnostic_report.json"


def build(run: Path, *, doctor: Path | None = None) -> str:
    """The report of ``run``. Without ``doctor``, a report of his beside the run or here is taken."""
    recorded = read_run(run)
    found = _doctor_report(doctor, beside=recorded.path.parent)
    return page(recorded, title=f"Run {_name(recorded.path.absolute().parent)}", doctor=found)


def _name(folder: Path) -> str:
    """Of the run's output folder, with its parent where it is just called output."""
    run = folder.parent if folder.name == "gh200" else folder
    return f"{run.parent.name}/{run.name}" if run.name == "output" else run.name


def write(content: str, path: Path) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as refused:
        raise UsageError(f"cannot write {path}: {refused.strerror}", remedy="name another file with -o") from None


def _doctor_report(explicit: Path | None, *, beside: Path) -> Mapping[str, Any] | None:
    candidates = [explicit] if explicit else [beside / "doctor.json", beside / DOCTOR_FILE, Path(DOCTOR_FILE)]
    for path in candidates:
        if path.is_file():
            return _read(path)
    if explicit is not None:
        raise UsageError(f"--doctor {explicit}: no such file", remedy="make one with gh200 doctor --output FILE")
    return None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise UsageError(f"{path} is no doctor's report: {broken}", remedy="gh200 doctor makes one") from None
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} is no doctor's report", remedy="gh200 doctor makes one")
    return content
