"""Following a run's telemetry, that of all its ranks, as it grows, is rotated, or is torn by a full disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.ranks import RankTable, rank_table, same_run
from simpletuner_gh200.operate.run_folder import is_project, output_of, telemetry_of
from simpletuner_gh200.operate.run_lock import in_use
from simpletuner_gh200.telemetry.reading import Recorded, add, parse_line, rank_files, read_run


class Follower:
    """One file. ``recorded`` holds everything so far; ``poll`` takes in what is new."""

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


class RunFollower:
    """A run with all ranks that write beside its main one; ranks that come later are taken in as they appear."""

    def __init__(self, telemetry: Path) -> None:
        self._main = Follower(telemetry)
        self._others: dict[Path, Follower] = {}
        self._find_others()

    @property
    def recorded(self) -> Recorded:
        return self._main.recorded

    def poll(self) -> None:
        self._main.poll()
        self._find_others()
        for other in self._others.values():
            other.poll()

    @property
    def others(self) -> list[Recorded]:
        """The run's other ranks, by their number."""
        found = [other.recorded for other in self._others.values() if same_run(self.recorded, other.recorded)]
        return sorted(found, key=lambda rank: rank.rank)

    def ranks(self) -> RankTable | None:
        return rank_table([self.recorded, *self.others])

    def close(self) -> None:
        for each in (self._main, *self._others.values()):
            each.close()

    def _find_others(self) -> None:
        for path in rank_files(self.recorded.path.parent):
            if path not in self._others:
                self._others[path] = Follower(path)


def wait_for(run: Path, every: float, say: Callable[[str], None]) -> Path:
    """The run's telemetry, waited for while a job is at work or may yet begin; UsageError where nothing is to be seen.

    Models are loaded and datasets staged before the first record.
    """
    told = False
    while True:
        try:
            return telemetry_of(run)
        except UsageError:
            if not (run.is_dir() and (is_project(run) or in_use(output_of(run)))):
                raise
        if not told:
            working = in_use(output_of(run))
            say(f"no records yet in {run}; " + (f"at work: {working}" if working else "waiting for a run to begin"))
            told = True
        time.sleep(every)
