"""A run and its plan: checked before, compared and learned from after."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import PLACEMENT
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import GH200Error, UsageError
from simpletuner_gh200.plan import calibration, planning
from simpletuner_gh200.plan.calibration import learned_context, learned_flops, learned_samples, measured_by_features
from simpletuner_gh200.plan.facts import truth
from simpletuner_gh200.plan.machines import this_machine
from simpletuner_gh200.plan.text import decision_line
from simpletuner_gh200.telemetry.reading import Recorded, read_run
from simpletuner_gh200.units import format_bytes, format_seconds

_OURS = (("optimizer", "grace"), ("ema", "grace"))
"""Rows of a plan that make the difference between a device and torch's account of it more than a context."""


@dataclass(frozen=True)
class PlannedRun:
    """What the plan says of a run that may start."""

    notes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """For its ranks: what ``memory: "auto"`` decided."""
    keep: Callable[[], None] = lambda: None
    """Leaves the plan beside the run, if that has a feature of ours on; for whoever has its output folder to himself.
    """


def check(training: Training, *, refuses: bool = True) -> PlannedRun:
    """Raises where the run can't fit, if it ``refuses``. Writes nothing."""
    try:
        return _check(training, refuses=refuses)
    except GH200Error:
        raise
    except Exception as mistake:  # noqa: BLE001 - whatever is wrong with the plan, the run may be right
        return PlannedRun((f"`gh200 plan` failed, and the run starts without it: {type(mistake).__name__}: {mistake}",))


def _check(training: Training, *, refuses: bool) -> PlannedRun:
    plan = planning.check_fit(training, refuses=refuses)
    if plan is None:
        return PlannedRun()
    decided = {} if plan.decision is None else {PLACEMENT: json.dumps(plan.decision.to_json())}
    close = plan.machine.has_device and not plan.fits
    notes = tuple(decision_line(plan))
    notes += ("by `gh200 plan`, with what it assumes, this run is close to what the machine has",) if close else ()
    output = training.values.get("output_dir")
    if not output or training.settings is None or not training.settings.any_given:
        return PlannedRun(notes, decided)
    return PlannedRun(notes, decided, partial(planning.keep, plan, Path(str(output))))


def compared(run: Recorded) -> list[tuple[str, str, str, str]]:
    """(what, planned, measured, how far off) of a recorded run that was planned."""
    plan = _kept(run)
    if plan is None:
        return []
    rows = []
    for what, planned, series, pick, shown in (
        ("HBM, most in use", _held(plan, "hbm"), "device/used", max, format_bytes),
        ("CPU memory of the process, most", _held(plan, "grace"), "host/resident", max, format_bytes),
        ("a step, at least", _step(plan), "step_seconds", min, format_seconds),
    ):
        values = [value for _step_number, value in run.series(series)]
        if values and planned:
            measured = pick(values)
            rows.append((what, shown(planned), shown(measured), f"{measured / planned - 1:+.0%}"))
    return rows


def foreseen(run: Recorded) -> dict[str, float]:
    """Bytes that the plan kept beside the run expects while it trains, by the series that measures them."""
    plan = _kept(run)
    return {} if plan is None else {"device/used": _held(plan, "hbm"), "host/resident": _held(plan, "grace")}


def learn(config: Mapping[str, Any], summary: Mapping[str, Any] | None = None) -> None:
    """After a run: what it measured is this machine's from now on. ``summary`` is what a rank told when it ended."""
    output = Path(str(config.get("output_dir") or ""))
    plan = planning.kept(output)
    if plan is None:
        return
    try:
        run = read_run(output)
    except UsageError:
        return
    here = this_machine()
    details = (summary or {}).get("details")
    measured = {**_rates(config, plan, run), **measured_by_features(details if isinstance(details, dict) else {})}
    calibration.remember(here, {**measured, "context": _context(plan, run)}, f"run {output.name}")


def _context(plan: Mapping[str, Any], run: Recorded) -> int | None:
    """What the device held beyond what torch reserved.

    Nothing is learned where we had memory of our own on the device, or torch reserved some in Grace.
    """
    if any((row["what"], row["pool"]) in _OURS for row in plan["bytes"]):
        return None
    reserved = dict(run.series("device/reserved"))
    moments = [(int(used), int(reserved[n])) for n, used in run.series("device/used") if n in reserved]
    return learned_context(moments)


def _rates(config: Mapping[str, Any], plan: Mapping[str, Any], run: Recorded) -> dict[str, float | None]:
    found = {"flops": learned_flops(plan["step"].get("flops"), run.steps)}
    way = {frozenset(): "from_files", frozenset({"vae", "text"}): "from_slabs"}.get(
        frozenset(plan.get("unified") or ()) & {"vae", "text"}
    )
    if way is not None and not truth(config.get("dataloader_prefetch")):  # which hides the data side behind the step
        found[way] = learned_samples(run.steps, int(run.start.get("ranks") or 1))
    return found


def _kept(run: Recorded) -> Mapping[str, Any] | None:
    """The plan beside a run that is looked at; None also for a file that is not one, or is another version's."""
    plan = planning.kept(run.path.parent.parent)
    try:
        if plan is not None:
            _held(plan, "hbm"), _held(plan, "grace"), _step(plan)
    except (KeyError, TypeError, ValueError):
        return None
    return plan


def _held(plan: Mapping[str, Any], pool: str) -> int:
    return int(plan["phases"]["train"][pool])


def _step(plan: Mapping[str, Any]) -> float:
    bounds = plan["step"]["bounds"]
    return float(bounds[plan["step"]["binding"]])
