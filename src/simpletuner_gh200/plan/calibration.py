"""Constants that no configuration says, as runs on this machine measured them: telemetry replaces assumptions.

After a run its report compares what was planned with what was seen; what the device held beyond what torch's tensors
explain is the context, and what the process held beyond its data is the process. The next plan uses that.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import Constants
from simpletuner_gh200.upstream.verdict_cache import cache_root, keep_json


def _file() -> Path:
    return cache_root() / "plan-constants.json"


def constants_for(machine: Machine) -> Constants:
    """Measured ones for this machine; what is assumed for any other."""
    if machine.name != "this":
        return Constants()
    try:
        known = json.loads(_file().read_text(encoding="utf-8"))
        context = int(known["context"])
    except (OSError, ValueError, KeyError, TypeError):
        return Constants()
    return replace(
        Constants(),
        context=context,
        context_measured=True,
        context_note=f"measured in {known.get('run', 'a run')} on this machine",
    )


def learned_context(planned_torch: int, device_peak: int) -> int | None:
    """What a device held beyond torch's planned bytes; None where that is no sensible figure."""
    beyond = device_peak - planned_torch
    return beyond if 0 < beyond <= max(device_peak // 4, 1) else None


def remember(context: int, run: str) -> None:
    keep_json(_file, {"context": context, "run": run})
