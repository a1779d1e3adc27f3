"""The cheap part of a plan, for those who have no minute: no torch, no tracing, files looked at for a moment only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import Training, read_training
from simpletuner_gh200.errors import GH200Error, RunFailed
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.plan.applying import with_settings
from simpletuner_gh200.plan.changes import cheapest, fastest
from simpletuner_gh200.plan.machines import Machine, this_machine
from simpletuner_gh200.plan.planning import Plan, make_plan, refusal
from simpletuner_gh200.plan.words import TOO_MUCH, summary
from simpletuner_gh200.telemetry.sink import write_whole

PATIENCE = 0.3
"""Seconds for looking at files; what is not seen by then is not counted, which only lowers the bound."""

MARGIN = 0.85
"""Of HBM, for settings that are chosen before anything of the run was traced."""

FILE = Path("gh200") / "plan.json"
"""Below a run's output folder: what was planned, for the report to compare."""


def quick_plan(training: Training, machine: Machine) -> Plan:
    return make_plan(training, machine, trace=False, patience=PATIENCE)


def check_fit(training: Training, *, driver: Driver | None = None, root: Path = Path("/")) -> Plan | None:
    """Before a run on this machine: raises where it can't fit, whatever is assumed; None where nothing can be said.

    Never refuses on a machine without a GPU: there somebody tries things out.
    """
    # The disk is left out: what a run will write may be there already, from its first stretch.
    machine = replace(this_machine(driver=driver, root=root), disk=None)
    if not training.values.get("model_family"):
        return None
    plan = quick_plan(training, machine)
    why = refusal(plan) if machine.has_device else None
    if why is not None:
        change = cheapest(plan.changes)
        remedy = f"{change.text()}; `gh200 plan` has more, and --no-plan starts it anyway" if change else None
        raise RunFailed(
            f"this run does not fit: {why}",
            remedy=remedy or "see `gh200 plan CONFIG` for what would fit; --no-plan starts it anyway",
        )
    return plan


def keep(plan: Plan, output: Path) -> None:
    """Leave the plan beside the run; a folder that can't be written is not this file's business."""
    with suppress(OSError):
        write_whole(output / FILE, plan.to_json())


def kept(output: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads((output / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class Advice:
    """What a plan has to say to somebody who is choosing settings."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """``key`` or ``block.key`` -> what makes it fit, or faster, and changes no number."""
    too_much: str | None = None
    """Why it does not fit even so, and what would help."""


def advised(values: Mapping[str, Any], machine: Machine) -> Advice:
    """For a configuration that is in no file yet; nothing where nothing is known of its model."""
    try:
        plan = quick_plan(_in_thought(values), replace(machine, hbm=int(MARGIN * machine.hbm)))
        change = fastest(plan.changes) if plan.fits else cheapest(plan.changes)
        settings = dict(change.settings) if change is not None and change.exact else {}
        return Advice(settings, _too_much(quick_plan(_in_thought(with_settings(values, settings)), machine)))
    except GH200Error:
        return Advice()


def _too_much(plan: Plan) -> str | None:
    if plan.fits:
        return None
    over = "; ".join(line.removesuffix(TOO_MUCH) for line in summary(plan) if line.endswith(TOO_MUCH))
    change = cheapest(plan.changes)
    remedy = f"{change.text()} would fit" if change else "a smaller batch or resolution, or more GPUs, may"
    return f"{over}; {remedy}"


def _in_thought(values: Mapping[str, Any]) -> Training:
    """A configuration that is in no file yet; its dataset list, neither."""
    flags = [
        f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"
        for key, value in values.items()
        if value is not None and key != "data_backend_config"
    ]
    return read_training(Located("cmd", None), {}, flags=flags)
