"""A run and its plan: checked before, compared and learned from after."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import Training, read_training
from simpletuner_gh200.errors import GH200Error, UsageError
from simpletuner_gh200.plan import calibration, quick
from simpletuner_gh200.telemetry.reading import Recorded, read_run
from simpletuner_gh200.units import format_bytes, format_seconds

_OURS = (("optimizer", "grace"), ("ema", "grace"), ("embeds", "hbm"))
"""Rows of a plan that make the difference between a device and torch's account of it more than a context."""


def check(located: Located, flags: Sequence[str], *, keep: bool) -> list[str]:
    """Raises where the run can't fit; leaves the plan beside a run that has a feature of ours on. Returns notices."""
    training = read_training(located, os.environ, flags=flags)
    try:
        return _check(training, keep=keep)
    except GH200Error:
        raise
    except Exception as mistake:  # noqa: BLE001 - whatever is wrong with the plan, the run may be right
        return [f"`gh200 plan` failed, and the run starts without it: {type(mistake).__name__}: {mistake}"]


def _check(training: Training, *, keep: bool) -> list[str]:
    plan = quick.check_fit(training)
    if plan is None:
        return []
    output = training.values.get("output_dir")
    if keep and output and training.settings is not None and training.settings.any_given:
        quick.keep(plan, Path(str(output)))
    return (
        []
        if plan.fits or not plan.machine.has_device
        else ["by `gh200 plan`, with what it assumes, this run is close to what the machine has"]
    )


def compared(run: Recorded) -> list[tuple[str, str, str, str]]:
    """(what, planned, measured, how far off) of a recorded run that was planned."""
    plan = quick.kept(run.path.parent.parent)
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


def learn(config: Mapping[str, Any]) -> None:
    """After a run: what its device held beyond what torch reserved is this machine's context from now on.

    Nothing is learned where we had memory of our own on the device, or torch reserved some in Grace.
    """
    output = Path(str(config.get("output_dir") or ""))
    plan = quick.kept(output)
    if plan is None or any((row["what"], row["pool"]) in _OURS for row in plan["bytes"]):
        return
    try:
        run = read_run(output)
    except UsageError:
        return
    reserved = dict(run.series("device/reserved"))
    moments = [(int(used), int(reserved[n])) for n, used in run.series("device/used") if n in reserved]
    found = calibration.learned_context(moments)
    if found is not None:
        calibration.remember(found, output.name)


def _held(plan: Mapping[str, Any], pool: str) -> int:
    return int(plan["phases"]["train"][pool])


def _step(plan: Mapping[str, Any]) -> float:
    bounds = plan["step"]["bounds"]
    return float(bounds[plan["step"]["binding"]])
