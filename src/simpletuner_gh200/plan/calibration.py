"""Constants that no configuration says, as runs on this machine measured them: telemetry replaces assumptions.

What a device held beyond what torch had reserved at the same moment is the context: both were measured, nothing
planned is in it. Others on the device are in it too, so it stays assumed where a run might be refused for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import Constants
from simpletuner_gh200.units import GIB
from simpletuner_gh200.upstream import user_cache

_KIND, _ENTRY = "plan", "constants"
"""In the user's cache."""

MOST = 8 * GIB
"""More than this is somebody else's, not a context."""


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
        context_note=f"as {known.get('run', 'a run')} left it on this machine",
    )


def learned_context(moments: Iterable[tuple[int, int]]) -> int | None:
    """Of (used on the device, reserved by torch) at some moments; None where that is no sensible figure."""
    beyond = [used - reserved for used, reserved in moments]
    if not beyond:
        return None
    usual = int(median(beyond))
    return usual if 0 < usual <= MOST else None


def remember(context: int, run: str) -> None:
    user_cache.store(_KIND, _ENTRY, {"context": context, "run": run})
