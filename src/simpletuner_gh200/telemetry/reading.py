"""Reading what a run recorded, while it is being written or long after."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError

FILE = Path("gh200") / "telemetry.jsonl"
"""Below a run's output folder."""


@dataclass
class Recorded:
    """A run as recorded: ``steps`` in order, each once; ``start`` and ``end`` of its last stretch."""

    path: Path
    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    unreadable: int = 0
    """Lines that are no records: torn by a full disk or a kill."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """All of them, in order."""
        return [record for record in (self.start, *self.steps, self.end) if record]

    @property
    def rank(self) -> int:
        """As its file's name says: records of older versions don't."""
        named = RANK_FILE.fullmatch(self.path.name)
        return int(named[1]) if named else 0

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a number in the step records; ``name`` may go down with slashes, as ``host/available``."""
        points = []
        for record in self.steps:
            value = dig(record, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
                points.append((int(record["step"]), float(value)))
        return points


def dig(record: dict[str, Any], name: str) -> Any:
    """The value at ``name``, one level down per slash; a metric's own name may have slashes too."""
    if name in record:
        return record[name]
    first, _, rest = name.partition("/")
    inside = record.get(first)
    return dig(inside, rest) if rest and isinstance(inside, dict) else None


def find_telemetry(run: Path) -> Path:
    """The telemetry of ``run``: an output folder, its ``gh200`` folder, or the file itself."""
    for candidate in (run, run / FILE, run / FILE.name):
        if candidate.is_file():
            return candidate
    raise UsageError(
        f"no telemetry in {run}",
        remedy="name the output_dir of a run with a block of ours, or one started with SIMPLETUNER_GH200_TELEMETRY=1",
    )


def read_run(run: Path) -> Recorded:
    """Everything recorded, rotated files included. After a resume the steps that were done again count once."""
    path = find_telemetry(run)
    recorded = Recorded(path)
    for file in (*_rotated(path), path):
        for line in _lines(file):
            record = parse_line(line)
            if record is None:
                recorded.unreadable += 1
            else:
                add(recorded, record)
    return recorded


RANK_FILE = re.compile(r"telemetry\.rank(\d+)\.jsonl")
"""Of a process other than the main one, beside the run's own file."""


def rank_files(folder: Path) -> list[Path]:
    """What ranks other than the main one left in ``folder``, by rank."""
    found = [(int(name[1]), file) for file in folder.iterdir() if (name := RANK_FILE.fullmatch(file.name))]
    return [file for _rank, file in sorted(found)]


def parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def add(recorded: Recorded, record: dict[str, Any]) -> None:
    """Take one record in."""
    if record["kind"] == "start":
        resumed = record.get("step")
        recorded.start, recorded.end = record, {}
        if isinstance(resumed, int):
            recorded.steps = [step for step in recorded.steps if step["step"] <= resumed]
    elif record["kind"] == "end":
        recorded.end = record
    elif record["kind"] == "step" and isinstance(record.get("step"), int):
        recorded.steps.append(record)


def _rotated(path: Path) -> list[Path]:
    """Oldest first."""
    found = [file for file in path.parent.glob(f"{path.name}.*") if file.suffix[1:].isdigit()]
    return sorted(found, key=lambda file: -int(file.suffix[1:]))


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as content:
        for line in content:
            if line.strip():
                yield line
