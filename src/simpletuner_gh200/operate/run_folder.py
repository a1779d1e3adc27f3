"""Where a run's things are, for whoever names its output folder, its project folder or a file: one reading for all.

A project is what ``gh200 init`` writes and what SimpleTuner expects: a folder with ``config/config.json`` (or .toml,
.env), whose ``output_dir`` is relative to the folder that the run was started in, mostly the project itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.files import FILE_NAMES, read_training_config
from simpletuner_gh200.errors import GH200Error, UsageError
from simpletuner_gh200.telemetry.reading import FILE, find_telemetry

OURS = "gh200"
"""The folder below an output folder that the extension writes to."""

_CACHES = Path(OURS, "cache")


def output_of(run: Path) -> Path:
    """The output folder meant by ``run``: itself, or that of the project it is. ``run`` must be there."""
    if not run.exists():
        raise UsageError(f"{run}: no such folder", remedy="name the output_dir of a run, or the folder of its project")
    if run.is_file() or (run / OURS).is_dir():
        return run
    found = [folder for folder in _outputs(run) if (folder / OURS).is_dir()]
    return found[0] if found else next(_outputs(run), run)


def telemetry_of(run: Path) -> Path:
    """The telemetry file of an output folder, a project folder, or the file itself; UsageError where there is none."""
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
    """The project's training configuration; empty where there is none or where it can't be read."""
    for name in FILE_NAMES.values():
        for path in (project / "config" / name, project / name):
            if path.is_file():
                try:
                    return read_training_config(path)
                except GH200Error:
                    return {}
    return {}


def is_project(folder: Path) -> bool:
    """Has it a training configuration, so that a run may begin there?"""
    return any((place / name).is_file() for place in (folder, folder / "config") for name in FILE_NAMES.values())


def newest_run(below: Path, depth: int = 4) -> Path:
    """The run whose telemetry was written last, somewhere below a folder."""
    found = [path for level in range(depth) for path in below.glob("*/" * level + str(FILE))]
    if not found:
        raise UsageError(
            f"no run with telemetry below {below.absolute()}",
            remedy="name the output_dir of the run, or the folder of its project",
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def run_name(telemetry: Path) -> str:
    """What to call a run in a title: its output folder, with the folder above where that is just called output."""
    folder = telemetry.absolute().parent
    run = folder.parent if folder.name == "gh200" else folder
    return f"{run.parent.name}/{run.name}" if run.name == "output" else run.name
