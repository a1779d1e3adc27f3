"""Reading what a run recorded, while it is being written or long after."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import isfinite
from mmap import ACCESS_READ, mmap
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

from simpletuner_gh200.errors import UsageError

FILE = Path("gh200") / "telemetry.jsonl"
"""Below a run's output folder."""
RANK_FILE = re.compile(r"telemetry\.rank(\d+)\.jsonl")
"""Of a process other than the main one, in the same folder as the run's own file."""
TAIL = 1 << 16
"""Bytes at the end of a file that surely hold its last steps."""

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
    caching: dict[str, Any] = field(default_factory=dict)
    """The last that was told of the caching pass before a stretch that is yet to begin."""
    _curves: dict[Hashable, tuple[list[Point], int]] = field(default_factory=dict, repr=False, compare=False)
    """By what they show: the points, and how many of the steps have been looked at for them."""
    _file: BinaryIO | None = field(default=None, repr=False, compare=False)
    _rest: bytes = field(default=b"", repr=False, compare=False)
    """The last line as far as it is written."""

    @classmethod
    def follow(cls, file: Path) -> Recorded:
        """Everything that is there; ``poll`` takes in what is added."""
        recorded = cls(file, _file=file.open("rb"))
        recorded.poll()
        return recorded

    @classmethod
    def tail(cls, file: Path) -> Recorded:
        """Only the last steps and what began them: what that costs does not grow with the run."""
        recorded = cls(file)
        with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
            began = max(0, content.rfind(b'{"kind":"start"'))
            content.seek(began)
            recorded.add(content.readline())
            if len(content) - content.tell() > TAIL:
                content.seek(-TAIL, SEEK_END)
                content.readline()
            for line in content.read().splitlines():
                recorded.add(line)
        return recorded

    def poll(self) -> None:
        if self._file is not None:
            *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
            for line in filter(bytes.strip, whole):
                self.add(line)

    def close(self) -> None:
        """No more will be added: a last line that nobody ended counts too."""
        if self._rest.strip():
            self.add(self._rest)
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    @property
    def rank(self) -> int:
        """As its file's name says: records of older versions don't."""
        named = RANK_FILE.fullmatch(self.path.name)
        return int(named[1]) if named else 0

    @property
    def step(self) -> int:
        """The last one that was recorded, or the one that the run started from."""
        began = self.start.get("step")
        return int(self.steps[-1]["step"]) if self.steps else began if isinstance(began, int) else 0

    def series(self, name: str) -> list[Point]:
        """(step, value) of a number in the step records; ``name`` may go down with slashes, as ``host/available``."""
        return self.curve(name, lambda record, _before: dig(record, name))

    def curve(self, key: Hashable, of: Callable[[dict[str, Any], dict[str, Any]], Any]) -> list[Point]:
        """(step, value) where ``of`` finds a number in a step and the one before it, which is empty before the first.

        ``key`` stands for ``of``. Not to be changed.
        """
        points, seen = self._curves.get(key, ([], 0))
        before = self.steps[seen - 1] if seen else {}
        for record in self.steps[seen:]:
            value, before = of(record, before), record
            if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
                points.append((int(record["step"]), float(value)))
        self._curves[key] = points, len(self.steps)
        return points

    def latest(self, name: str, count: int = 1, *, after: int = 0) -> list[float]:
        """The last values of a series, without its first ``after``."""
        points = self.series(name)
        return [value for _step, value in points[max(after, len(points) - count) :]]

    def last(self, name: str) -> float | None:
        return next(iter(self.latest(name)), None)

    def add(self, line: bytes) -> None:
        """Take one line of the file in."""
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "kind" not in record:
            self.unreadable += 1
        elif record["kind"] == "start":
            self._begin(record)
        elif record["kind"] == "caching":
            self.caching = record
            if self.end or self.start.get("pid") != record.get("pid"):
                of_the_process = {name: record.get(name) for name in ("pid", "host", "time")}
                self.start, self.end = {**self.start, **of_the_process}, {}
        elif record["kind"] == "end":
            self.end = record
        elif record["kind"] == "step" and isinstance(record.get("step"), int):
            self.steps.append(record)

    def _begin(self, record: dict[str, Any]) -> None:
        """A stretch begins; steps after the one it resumes from are done again."""
        self.start, self.end, self.caching = record, {}, {}
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


def read_run(run: Path) -> Recorded:
    """Everything recorded, a last line that nobody ended included.

    After a resume the steps that were done again count once.
    """
    recorded = Recorded.follow(find_telemetry(run))
    recorded.close()
    return recorded


def rank_files(folder: Path) -> list[Path]:
    """What ranks other than the main one left in ``folder``, by rank."""
    found = [(int(name[1]), file) for file in folder.iterdir() if (name := RANK_FILE.fullmatch(file.name))]
    return [file for _rank, file in sorted(found)]
