"""A run as people see it: its status, its numbers, its ranks; the terminal, the report and the Web UI show the same."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import psutil

from simpletuner_gh200.telemetry.alerts import Alert, alerts
from simpletuner_gh200.telemetry.numbers import numbers_of
from simpletuner_gh200.telemetry.ranks import RankTable, rank_table, read_ranks, same_run
from simpletuner_gh200.telemetry.reading import FILE, Recorded, dig, rank_files, read_run
from simpletuner_gh200.units import format_seconds

State = Literal["running", "ended", "gone", "unseen"]

CLOCKS = 120.0
"""Seconds by which a process may seem younger than the first record it wrote: clocks are set."""
PATIENCE = 30.0
"""Seconds without a record after which a process that is not there is gone, and not just in another container."""
PACE = 50
"""Latest steps that tell how long the rest takes; saving and validation are among them, as they will be."""
RECENT = 200
"""Latest steps that ranks are compared over while a run goes on: who is slow now."""


@dataclass(frozen=True)
class RunStatus:
    """``words`` are for people. ``elapsed`` and ``remaining`` are seconds; None where nothing can be said."""

    state: State
    words: str
    elapsed: float | None
    remaining: float | None


class RunView:
    """``run`` is what the main rank recorded; what is asked again costs what is new since ``refresh``."""

    def __init__(self, run: Recorded, others: Sequence[Recorded] = ()) -> None:
        self.run = run
        self._others = {other.path: other for other in others}

    @classmethod
    def read(cls, telemetry: Path, other_nodes: Sequence[Path] = ()) -> RunView:
        """All that there is. ``other_nodes``: output folders of the run's other nodes."""
        main = read_run(telemetry)
        return cls(main, read_ranks(main, other_nodes)[1:])

    @classmethod
    def follow(cls, telemetry: Path) -> RunView:
        """Grows with the run; ranks that come later are taken in as they appear."""
        view = cls(Recorded.follow(telemetry))
        view._find_others()
        return view

    @classmethod
    def glance(cls, output: Path) -> RunView | None:
        """The last steps of the run below an output folder; None while there is none. Raises OSError."""
        try:
            return cls(Recorded.tail(output / FILE))
        except (FileNotFoundError, ValueError):  # an empty file can't be mapped
            return None

    def refresh(self) -> None:
        self._find_others()
        for each in (self.run, *self._others.values()):
            each.poll()

    def _find_others(self) -> None:
        for path in rank_files(self.run.path.parent):
            if path not in self._others:
                self._others[path] = Recorded.follow(path)

    # -- what is seen ------------------------------------------------------------------------------------------

    @property
    def others(self) -> list[Recorded]:
        """The run's other ranks, by their number."""
        return sorted((one for one in self._others.values() if same_run(self.run, one)), key=lambda one: one.rank)

    def ranks(self, *, latest: int = 0) -> RankTable | None:
        return rank_table([self.run, *self.others], latest=latest)

    def status(self, *, now: float | None = None, here: str | None = None) -> RunStatus:
        """By the run's process where that can be seen from ``here``, else by the age of its records."""
        moment = time.time() if now is None else now
        state, words = _state(self.run, moment, here or platform.node())
        began, ended = (_number(record.get("time")) for record in (self.run.start, self.run.end))
        until = ended if state == "ended" else _last(self.run) if state == "gone" else moment
        elapsed = max(0.0, until - began) if began is not None and until is not None else None
        return RunStatus(state, words, elapsed, _remaining(self.run) if state in ("running", "unseen") else None)

    def alerts(self, *, at: float | None = None) -> list[Alert]:
        """What was wrong ``at`` a time, or is now; and whether its process is gone by now."""
        status = self.status()
        gone = status.words if status.state == "gone" else ""
        return alerts(self.run, time.time() if at is None else at, gone=gone, others=self.others)

    def progress(self) -> list[tuple[str, str]]:
        """(what, text): whether it is alive and how far it is."""
        status, wanted = self.status(), self.run.start.get("max_steps")
        rows = [("status", status.words), ("step", f"{self.run.step} of {wanted}" if wanted else str(self.run.step))]
        features = self.run.steps[-1].get("features") if self.run.steps else None
        behind = features.get("behind") if isinstance(features, dict) else None
        if isinstance(behind, dict):  # there is a time in which a step is saved and not on disk
            rows.append(("safe on disk", str(behind.get("safe") or "no checkpoint yet")))
        if self.run.caching:
            rows.append(("caching", str(self.run.caching.get("words"))))
        if status.elapsed is not None:
            rows.append(("elapsed", format_seconds(status.elapsed)))
        if status.remaining is not None:
            rows.append(("remaining", f"about {format_seconds(status.remaining)}"))
        return rows

    def latest(self) -> list[tuple[str, str]]:
        """(what, text) of the newest numbers."""
        return [(number.title, number.unit(points[-1][1])) for number, points in numbers_of(self.run)]

    def whole(self) -> list[tuple[str, str]]:
        """(what, text) of the numbers that stand for the whole run."""
        return [
            (
                number.title if number.whole == "last" else f"{number.whole} {number.title}",
                number.of_the_run([value for _step, value in points]),
            )
            for number, points in numbers_of(self.run)
        ]


def _state(run: Recorded, now: float, here: str) -> tuple[State, str]:
    if run.end:
        reason = run.end.get("reason")
        return "ended", f"{run.end.get('status')}" + (f": {reason}" if reason else "")
    pid, host, last = run.start.get("pid"), run.start.get("host"), _last(run)
    silent = max(now - last, 0.0) if last is not None else 0.0
    if not isinstance(pid, int):
        return "unseen", "no end recorded: still running, or killed"
    if host != here:
        return "unseen", f"on {host}, which can't be seen from here; last record {format_seconds(silent)} ago"
    if _alive(pid, _number(run.start.get("time"))):
        return "running", f"running, process {pid}"
    if silent < max(PATIENCE, 3 * median(_pace(run) or [0.0])):
        return "unseen", f"running {format_seconds(silent)} ago; its process {pid} is not one of this system's"
    return "gone", f"its process {pid} ended without recording it: killed, or the machine was restarted"


def _alive(pid: int, began: float | None) -> bool:
    """A process of that number that was there when the run began, so that it is not another's number since."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and (began is None or process.create_time() < began + CLOCKS)
    except psutil.Error:
        return False


def _remaining(run: Recorded) -> float | None:
    wanted, latest = run.start.get("max_steps"), _pace(run)
    if not isinstance(wanted, int) or not run.steps or not latest:
        return None
    left = dig(run.steps[-1], "features/ramp/samples_left")
    samples = sum(run.latest("effective_batch", len(latest)))
    if isinstance(left, int) and samples:
        return left * sum(latest) / samples
    return max(0, wanted - run.step) * sum(latest) / len(latest)


def _pace(run: Recorded) -> list[float]:
    """The lengths of the latest steps; the first one's only where there is no other."""
    return run.latest("step_seconds", PACE, after=1) or run.latest("step_seconds")


def _last(run: Recorded) -> float | None:
    return _number(run.steps[-1].get("time")) if run.steps else _number(run.start.get("time"))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
