"""Reading what a run recorded, while it is being written or long after."""

from __future__ import annotations

import json
import os
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

_MOST_FILES = 100
"""Older files that are looked for; there are never so many."""

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
    _lines: RotatedLines | None = field(default=None, repr=False, compare=False)

    @classmethod
    def follow(cls, file: Path) -> Recorded:
        """Everything that is there; ``poll`` takes in what is added."""
        recorded = cls(file, _lines=RotatedLines(file))
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
        for line in self._lines.new() if self._lines is not None else ():
            self.add(line)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

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


def read_run(run: Path) -> Recorded:
    """Everything recorded, rotated files and a last line that nobody ended included.

    After a resume the steps that were done again count once.
    """
    recorded = Recorded.follow(find_telemetry(run))
    assert recorded._lines is not None
    if recorded._lines.rest.strip():
        recorded.add(recorded._lines.rest)
    recorded.close()
    return recorded


def rank_files(folder: Path) -> list[Path]:
    """What ranks other than the main one left in ``folder``, by rank."""
    found = [(int(name[1]), file) for file in folder.iterdir() if (name := RANK_FILE.fullmatch(file.name))]
    return [file for _rank, file in sorted(found)]


class RotatedLines:
    """The lines of ``path`` and of the older files next to it, each of them once and in order, while it is written.

    ``path.1`` is the youngest of the older ones. Files are known by what they are, not by their names, which change
    under the reader's eyes. Of a rotation it counts on what ``sink.JsonLines`` does: a file is not written any more
    once it is renamed, and the oldest is renamed first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rest = b""
        """The last line as far as it is written."""
        self._files: list[BinaryIO] = []
        """The oldest first: all but the last are complete."""
        self._files = self._younger()
        if not self._files:
            raise FileNotFoundError(path)

    def new(self) -> list[bytes]:
        """Whole lines that were added since the last call."""
        self._files += self._younger()  # before the older ones are read to their end
        lines: list[bytes] = []
        while True:
            *whole, self.rest = (self.rest + self._files[0].read()).split(b"\n")
            lines += [line for line in whole if line.strip()]
            if len(self._files) == 1:
                return lines
            lines += [self.rest] if self.rest.strip() else []
            self.rest = b""
            self._files.pop(0).close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _younger(self) -> list[BinaryIO]:
        """Files begun after those we have, the oldest first; all of them, if ours were removed meanwhile.

        What was rotated while we looked through the names is looked through again. The newest is known by a file that
        we hold open: the number of one that was removed may be given to the next.
        """
        while True:
            newest: tuple[int, int] | None = None
            found: dict[tuple[int, int], BinaryIO] = {}
            ours = os.fstat(self._files[-1].fileno()) if self._files else None
            for number in range(_MOST_FILES):
                name = f"{self.path.name}.{number}" if number else self.path.name
                try:
                    file: BinaryIO = self.path.with_name(name).open("rb")
                except FileNotFoundError:
                    continue
                state = os.fstat(file.fileno())
                if not number:
                    newest = state.st_dev, state.st_ino
                if ours is not None and os.path.samestat(ours, state):
                    file.close()
                    break
                found.setdefault((state.st_dev, state.st_ino), file)
            if _identity(self.path) == newest:
                return list(found.values())[::-1]
            for file in found.values():
                file.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_dev, state.st_ino
