"""Following a telemetry file as it grows, is rotated, or is torn by a full disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.telemetry.reading import FILE, add, find_telemetry, parse_line, read_run

DEPTH = 4
"""How far below the working folder an unnamed run is looked for."""


class Follower:
    """``recorded`` holds everything so far; ``poll`` takes in what is new."""

    def __init__(self, run: Path) -> None:
        self.recorded = read_run(run)
        self._file: BinaryIO | None = self.recorded.path.open("rb")
        self._file.seek(0, 2)
        self._inode = self.recorded.path.stat().st_ino
        self._rest = b""

    def poll(self) -> int:
        """Take in new records; returns how many there were."""
        taken = self._take()
        if self._was_replaced():
            self.close()
            self._file, self._rest = self.recorded.path.open("rb"), b""
            self._inode = self.recorded.path.stat().st_ino
            taken += self._take()
        return taken

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self) -> int:
        assert self._file is not None
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        records = [record for line in lines if line.strip() and (record := parse_line(line)) is not None]
        for record in records:
            add(self.recorded, record)
        return len(records)

    def _was_replaced(self) -> bool:
        try:
            return self.recorded.path.stat().st_ino != self._inode
        except FileNotFoundError:
            return False  # between two files of a rotation; the next poll finds the new one


def wait_for(run: Path, every: float) -> None:
    """Until the run records something: models are loaded and datasets staged before the first step."""
    while True:
        try:
            find_telemetry(run)
            return
        except UsageError:
            time.sleep(every)


def newest_run(below: Path) -> Path:
    """The run whose telemetry was written last, somewhere below a folder."""
    found = [path for depth in range(DEPTH) for path in below.glob("*/" * depth + str(FILE))]
    if not found:
        raise UsageError(f"no run with telemetry below {below.absolute()}", remedy="name the output_dir of the run")
    return max(found, key=lambda path: path.stat().st_mtime)
