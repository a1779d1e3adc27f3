"""Constants that no configuration says, as runs on this machine measured them: telemetry replaces assumptions.

After a run its report compares what was planned with what was seen; what the device held beyond what torch's tensors
explain is the context, and what the process held beyond its data is the process. The next plan uses that.
"""

from __future__ import annotations

from dataclasses import replace

from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import Constants
from simpletuner_gh200.upstream import user_cache

_KIND, _ENTRY = "plan", "constants"
"""In the user's cache."""


def constants_for(machine: Machine) -> Constants:
    """Measured ones for this machine; what is assumed for any other."""
    if machine.name != "this":
        return Constants()
    known = user_cache.load(_KIND, _ENTRY)
    try:
        context = int(known["context"])
    except (ValueError, KeyError, TypeError):
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
    user_cache.store(_KIND, _ENTRY, {"context": context, "run": run})
