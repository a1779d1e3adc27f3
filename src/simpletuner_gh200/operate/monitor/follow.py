"""A run with all of its ranks, as their records grow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.ranks import RankTable, rank_table, same_run
from simpletuner_gh200.operate.run_folder import is_project, output_of, telemetry_of
from simpletuner_gh200.operate.run_lock import in_use
from simpletuner_gh200.telemetry.reading import Follower, Recorded, rank_files

RECENT = 200
"""Latest steps that ranks are compared over: who is slow now."""


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
        return rank_table([self.recorded, *self.others], latest=RECENT)

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
