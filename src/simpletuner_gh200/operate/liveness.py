"""Is a recorded run still at it? By its process where that can be seen from here, else by the age of its records."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from statistics import median
from typing import Literal

import psutil

from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import format_seconds

State = Literal["running", "ended", "gone", "unseen"]

CLOCKS = 120.0
"""Seconds by which a process may seem younger than the first record it wrote: clocks are set."""
PATIENCE = 30.0
"""Seconds without a record after which a process that is not there is gone, and not just in another container."""
PACE = 50
"""Latest steps that tell how long the rest takes; saving and validation are among them, as they will be."""


@dataclass(frozen=True)
class Liveness:
    """``words`` are for people. ``elapsed`` and ``remaining`` are seconds; None where nothing can be said."""

    state: State
    words: str
    elapsed: float | None
    remaining: float | None


def liveness(run: Recorded, *, now: float | None = None, here: str | None = None) -> Liveness:
    """``here``: the name of this machine."""
    moment = time.time() if now is None else now
    state, words = _state(run, moment, here or platform.node())
    began, ended = _number(run.start.get("time")), _number(run.end.get("time"))
    until = ended if state == "ended" else _last(run) if state == "gone" else moment
    elapsed = max(0.0, until - began) if began is not None and until is not None else None
    return Liveness(state, words, elapsed, _remaining(run) if state in ("running", "unseen") else None)


def _state(run: Recorded, now: float, here: str) -> tuple[State, str]:
    if run.end:
        reason = run.end.get("reason")
        return "ended", f"{run.end.get('status')}" + (f": {reason}" if reason else "")
    pid, host, last = run.start.get("pid"), run.start.get("host"), _last(run)
    silent = now - last if last is not None else 0.0
    if not isinstance(pid, int) or not run.start:
        return "unseen", "no end recorded: still running, or killed"
    if host != here:
        return "unseen", f"on {host}, which can't be seen from here; last record {format_seconds(max(silent, 0))} ago"
    if _alive(pid, _number(run.start.get("time"))):
        return "running", f"running, process {pid}"
    if silent < max(PATIENCE, 3 * _usual_step(run)):
        return "unseen", f"running {format_seconds(max(silent, 0))} ago; its process {pid} is not one of this system's"
    return "gone", f"its process {pid} is gone without an end recorded: killed, or the machine was restarted"


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
    return max(0, wanted - int(run.steps[-1]["step"])) * sum(latest) / len(latest)


def _usual_step(run: Recorded) -> float:
    return median(_pace(run) or [0.0])


def _pace(run: Recorded) -> list[float]:
    """The lengths of the latest steps; the first one's only where there is no other."""
    return run.latest("step_seconds", PACE, after=1) or run.latest("step_seconds", 1)


def _last(run: Recorded) -> float | None:
    return _number(run.steps[-1].get("time")) if run.steps else _number(run.start.get("time"))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
