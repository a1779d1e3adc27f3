"""Reading what a run recorded, while it is being written or long after."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.telemetry.rotated import RotatedLines

FILE = Path("gh200") / "telemetry.jsonl"
"""Below a run's output folder."""


Point = tuple[int, float]
"""Of a curve: the step, and a value."""


@dataclass
class Recorded:
    """A run as recorded: ``steps`` in order, each once; ``start`` and ``end`` of its last stretch.

    Curves are kept and grow with ``steps``: to ask again costs what is new, however long the run is.
    """

    path: Path
    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    unreadable: int = 0
    """Lines that are no records: torn by a full disk or a kill."""
    _curves: dict[Hashable, tuple[list[Point], int]] = field(default_factory=dict, repr=False, compare=False)
    """By what they show: the points, and how many of the steps have been looked at for them."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """All of them, in order."""
        return [record for record in (self.start, *self.steps, self.end) if record]

    @property
    def rank(self) -> int:
        """As its file's name says: records of older versions don't."""
        named = RANK_FILE.fullmatch(self.path.name)
        return int(named[1]) if named else 0

    def series(self, name: str) -> list[Point]:
        """(step, value) of a number in the step records; ``name`` may go down with slashes, as ``host/available``."""
        return self.curve(name, lambda record: dig(record, name))

    def curve(self, key: Hashable, of: Callable[[dict[str, Any]], Any]) -> list[Point]:
        """(step, value) where ``of`` finds a number in a step; ``key`` stands for ``of``. Not to be changed."""
        points, seen = self._curves.get(key, ([], 0))
        for record in self.steps[seen:]:
            value = of(record)
            if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
                points.append((int(record["step"]), float(value)))
        self._curves[key] = points, len(self.steps)
        return points

    def latest(self, name: str, count: int, *, after: int = 0) -> list[float]:
        """The last values of a series, without its first ``after``."""
        points = self.series(name)
        return [value for _step, value in points[max(after, len(points) - count) :]]

    def add(self, line: bytes) -> None:
        """Take one line of the file in."""
        record = parse_line(line)
        if record is None:
            self.unreadable += 1
        elif record["kind"] == "start":
            self._begin(record)
        elif record["kind"] == "end":
            self.end = record
        elif record["kind"] == "step" and isinstance(record.get("step"), int):
            self.steps.append(record)

    def _begin(self, record: dict[str, Any]) -> None:
        """A stretch begins; steps after the one it resumes from are done again."""
        if record == self.start:
            return  # repeated at the head of a rotated file
        self.start, self.end = record, {}
        resumed = record.get("step")
        if isinstance(resumed, int):
            self.steps = [step for step in self.steps if step["step"] <= resumed]
            self._curves.clear()


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


class Follower:
    """One file as it grows: ``recorded`` holds everything so far, ``poll`` takes in what is new."""

    def __init__(self, run: Path) -> None:
        self.recorded = Recorded(find_telemetry(run))
        self._lines = RotatedLines(self.recorded.path)
        self.poll()

    def poll(self) -> int:
        """Returns how many lines were new."""
        lines = self._lines.new()
        for line in lines:
            self.recorded.add(line)
        return len(lines)

    def finish(self) -> Recorded:
        """With a last line that nobody ended."""
        if self._lines.rest.strip():
            self.recorded.add(self._lines.rest)
        return self.recorded

    def close(self) -> None:
        self._lines.close()


def read_run(run: Path) -> Recorded:
    """Everything recorded, rotated files included. After a resume the steps that were done again count once."""
    with closing(Follower(run)) as follower:
        return follower.finish()


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
