"""Where a run's things are, for whoever names its output or project folder, its configuration, a file of it or nothing.

A project is what ``gh200 init`` writes and what SimpleTuner expects: a folder with ``config/config.json`` (or .toml,
.env), whose ``output_dir`` is relative to the folder that the run was started in, mostly the project itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.files import FILE_NAMES, read_training_config
from simpletuner_gh200.errors import GH200Error, UsageError
from simpletuner_gh200.telemetry.reading import FILE, find_telemetry
from simpletuner_gh200.telemetry.view import RunView

OURS = "gh200"
"""The folder below an output folder that the extension writes to."""

_CACHES = Path(OURS, "cache")
_LATELY = 300.0
"""Seconds since its last record within which a run that can't be seen from here is taken for one that goes on."""


def output_of(run: Path) -> Path:
    """The output folder meant by ``run``: itself, or that of its project or configuration. ``run`` must be there."""
    if not run.exists():
        raise UsageError(f"{run}: no such folder", remedy="name the output_dir of a run, or the folder of its project")
    if run.is_file() and _is_configuration(run):
        named = read_training_config(run).get("output_dir")
        project = run.parent.parent if run.parent.name == "config" else run.parent
        return next((path for path in _against(project, named) if path.is_dir()), Path(str(named or "output")))
    if run.is_file() or (run / OURS).is_dir():
        return run
    found = [folder for folder in _outputs(run) if (folder / OURS).is_dir()]
    return found[0] if found else next(_outputs(run), run)


def telemetry_of(run: Path | None) -> Path:
    """The telemetry file of ``run``, or of the newest run here where none is named; UsageError where there is none."""
    if run is None or (run.is_dir() and output_of(run) == run and _runs_below(run, 2) and not _runs_below(run, 1)):
        return newest_run(run or Path())  # of several outputs
    return find_telemetry(output_of(run))


def caches_of(folder: Path) -> Path:
    """The folder with packs that is meant: a ``cache_dir``, or that of a run's output or project folder."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder", remedy="name a cache_config.cache_dir, or the output_dir or project of a run"
        )
    values = _configuration(folder)
    named = (
        (values.get("cache_config") or {}).get("cache_dir") if isinstance(values.get("cache_config"), dict) else None
    )
    candidates = [*_against(folder, named), *(output / _CACHES for output in (folder, *_outputs(folder)))]
    return next((path for path in candidates if path.is_dir()), folder)


def _outputs(project: Path) -> Iterator[Path]:
    """Folders that may be the output of ``project``: as its configuration says, else the usual name."""
    yield from (path for path in _against(project, _configuration(project).get("output_dir")) if path.is_dir())
    if (project / "output").is_dir():
        yield project / "output"


def _against(project: Path, named: object) -> list[Path]:
    """A path of a configuration, from the project's folder and from here."""
    return [project / named, Path(named)] if isinstance(named, str) and named else []


def _configuration(project: Path) -> dict[str, Any]:
    """What the project's training configuration sets; empty where there is none or where it can't be read."""
    path = _configuration_in(project)
    try:
        return read_training_config(path) if path is not None else {}
    except GH200Error:
        return {}


def _configuration_in(project: Path) -> Path | None:
    places = (place / name for name in FILE_NAMES.values() for place in (project / "config", project))
    return next((path for path in places if path.is_file()), None)


def configuration_of(run: Path) -> Path | None:
    """The training configuration of ``run``: itself, or that of the project that it is, or whose output it is."""
    if run.is_file():
        return run if _is_configuration(run) else None
    above = _configuration_in(run.absolute().parent)
    its_output = above is not None and output_of(above).absolute() == run.absolute()
    return _configuration_in(run) or (above if its_output else None)


def _is_configuration(file: Path) -> bool:
    return file.suffix.removeprefix(".") in FILE_NAMES


def newest_run(below: Path, depth: int = 4) -> Path:
    """The telemetry, somewhere below a folder, of the run that goes on; of several or none, what was written last.

    What lies in a run's own folder, as a baseline does, is no run by itself.
    """
    found = _runs_below(below, depth)
    if not found:
        raise UsageError(
            f"no run with telemetry below {below.absolute()}",
            remedy="name the output_dir of the run, or the folder of its project",
        )
    return max(found, key=lambda path: (_goes_on(path), path.stat().st_mtime))


def _runs_below(folder: Path, depth: int) -> list[Path]:
    found = (path for level in range(depth) for path in folder.glob("*/" * level + str(FILE)))
    return [path for path in found if OURS not in path.relative_to(folder).parts[:-2]]


def _goes_on(telemetry: Path) -> bool:
    view = RunView.glance(telemetry.parent.parent)
    state = view.status().state if view is not None else "gone"
    return state == "running" or (state == "unseen" and time.time() - telemetry.stat().st_mtime < _LATELY)


def run_name(telemetry: Path) -> str:
    """What to call a run in a title: its output folder, with the folder above where that is just called output."""
    folder = telemetry.absolute().parent
    run = folder.parent if folder.name == "gh200" else folder
    return f"{run.parent.name}/{run.name}" if run.name == "output" else run.name
