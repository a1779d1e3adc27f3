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

_NOT_TORCHS = ("context", "fragmentation")


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
    """After a run: what its device held beyond torch's planned bytes is this machine's context from now on."""
    output = Path(str(config.get("output_dir") or ""))
    plan = quick.kept(output)
    if plan is None:
        return
    try:
        run = read_run(output)
    except UsageError:
        return
    used = [int(value) for _step_number, value in run.series("device/used")]
    torchs = sum(row["bytes"] for row in plan["bytes"] if _torch_in_training(row))
    found = calibration.learned_context(torchs, max(used)) if used and torchs else None
    if found is not None:
        calibration.remember(found, output.name)


def _torch_in_training(row: Mapping[str, Any]) -> bool:
    return row["pool"] == "hbm" and row["phase"] in (None, "train") and row["what"] not in _NOT_TORCHS


def _held(plan: Mapping[str, Any], pool: str) -> int:
    return int(plan["phases"]["train"][pool])


def _step(plan: Mapping[str, Any]) -> float:
    bounds = plan["step"]["bounds"]
    return float(bounds[plan["step"]["binding"]])
