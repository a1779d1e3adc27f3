"""The few numbers that say how a run went."""

from __future__ import annotations

import time
from statistics import median

from simpletuner_gh200.operate.liveness import Liveness
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import format_bytes, format_seconds


def summary(run: Recorded, alive: Liveness | None = None) -> list[tuple[str, str]]:
    """(what, value), ready for people. The first step is left out of medians: it pays for the others' warm-up.

    ``alive``: what is known beyond the records.
    """
    rows = [("status", alive.words if alive is not None else _status(run)), ("optimizer steps", _progress(run))]
    if alive is not None and alive.elapsed is not None:
        rows.append(("elapsed", format_seconds(alive.elapsed)))
    if alive is not None and alive.remaining is not None:
        rows.append(("remaining", f"about {format_seconds(alive.remaining)}"))
    started = run.start.get("time")
    if isinstance(started, int | float):
        rows.append(("started", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started))))
    rows += _speed(run)
    losses = [value for _step, value in run.series("loss")]
    if losses:
        rows.append(("last loss", f"{losses[-1]:.5g}"))
    for what, name, pick in _EXTREMES:
        values = [value for _step, value in run.series(name)]
        if values:
            rows.append((what, format_bytes(pick(values))))
    short = [value for _step, value in run.series("features/state/oom_reserve/times")]
    if short:
        rows.append(("times the reserve was in use", f"{max(short):g}"))
    chosen = _activations(run)
    if chosen:
        rows.append(("activations", chosen))
    if run.unreadable:
        rows.append(("unreadable records", str(run.unreadable)))
    return rows


def _speed(run: Recorded) -> list[tuple[str, str]]:
    seconds, waits, rates = (_values(run, name) for name in ("step_seconds", "data_wait_seconds", "samples_per_second"))
    rows = []
    if seconds and sum(seconds) > 0:
        rows.append(("median step", format_seconds(median(seconds))))
        rows.append(("data wait", f"{sum(waits) / sum(seconds) * 100:.1f} % of the time"))
    if rates:
        rows.append(("throughput", f"{median(rates):.3g} samples/s"))
    return rows


def _values(run: Recorded, name: str) -> list[float]:
    values = [value for _step, value in run.series(name)]
    return values[1:] or values


_EXTREMES = (
    ("least host memory available", "host/available", min),
    ("most memory of the process", "host/resident", max),
    ("most HBM in use", "device/used", max),
    ("model state in Grace", "features/state/bytes", max),
    ("most of the reserve in use", "features/state/oom_reserve/most", max),
)


def _activations(run: Recorded) -> str | None:
    """What was chosen for saved activations, and what it gained or lost, as the last step tells it."""
    features = run.steps[-1].get("features") if run.steps else None
    told = features.get("activations") if isinstance(features, dict) else None
    if not isinstance(told, dict) or not isinstance(told.get("chosen"), str):
        return None
    moved = told.get("moved_bytes")
    size = f" ({format_bytes(moved)} moved)" if isinstance(moved, int | float) and moved else ""
    return f"{told['chosen']}{size}"


def _status(run: Recorded) -> str:
    if not run.end:
        return "no end recorded: still running, or killed"
    reason = run.end.get("reason")
    return f"{run.end.get('status')}" + (f": {reason}" if reason else "")


def _progress(run: Recorded) -> str:
    last = run.steps[-1]["step"] if run.steps else run.start.get("step", 0)
    wanted = run.start.get("max_steps")
    return f"{last} of {wanted}" if wanted else str(last)
