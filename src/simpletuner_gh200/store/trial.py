"""Trying a folder: staged as a run would stage it, reported, and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.store.discovery import walk
from simpletuner_gh200.store.problems import printable
from simpletuner_gh200.store.staging import estimates, request_for, stage

SHOWN_PROBLEMS = 20


def try_folder(folder: Path, settings: InMemorySettings) -> dict[str, Any]:
    """JSON-ready: the staging's report, and what each codec would make of the folder.

    Broken files never stop a trial, since it is there to find them; the ceiling does.
    """
    lenient = settings.model_copy(update={"max_corruption_rate": 1.0})
    memory, report = stage(request_for(folder, lenient), label=f"staging {printable(folder.name)}")
    memory.close()
    guesses = estimates(walk(folder, settings.file_extensions), ("lz4", "zlib", "snappy", "zstd"))
    return {
        **report.as_json(),
        "estimates": guesses,
        "first_problems": [str(problem) for problem in list(report.problems)[:SHOWN_PROBLEMS]],
    }
