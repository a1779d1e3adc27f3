"""What runs and measurements on this machine found out: they take the place of what is cited or assumed of it.

Two kinds. *Context*: what a device held beyond what torch had reserved at the same moment; both were measured, nothing
planned is in it. Others on the device are in it too, so it stays assumed where a run might be refused for it.
*Rates*: operations and bytes per second, as a run or a command that measures saw them; no refusal rests on a rate.

Everybody who measures a rate calls ``remember_rates``; everybody who plans is handed a ``calibrated`` machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from simpletuner_gh200.plan.beside import Constants
from simpletuner_gh200.plan.machines import RATES, Machine
from simpletuner_gh200.upstream import user_cache

_KIND = "plan"
"""In the user's cache."""

BELIEVED = 100
"""A rate that is so many times higher or lower than the one that was assumed is a mistake of whoever measured it."""


def remember_rates(machine: Machine, rates: Mapping[str, float | None], source: str) -> None:
    """Keep measured rates of this machine for its next plans; ``source`` says who measured (a run, a command).

    Names are those of ``machines.RATES``, in bytes, operations or samples per second. None: could not be measured.
    """
    unknown = sorted(rates.keys() - RATES.keys())
    if unknown:
        raise ValueError(f"no rate of a machine: {', '.join(unknown)}; there are {', '.join(RATES)}")
    found = {name: rate for name, rate in rates.items() if rate is not None and _believable(machine, name, rate)}
    if found:
        known = _known(machine)
        measured = {name: {"value": float(rate), "source": source} for name, rate in found.items()}
        _keep(machine, {**known, "rates": {**_mapping(known.get("rates")), **measured}})


def calibrated(machine: Machine) -> Machine:
    """This machine with the rates that were measured on it, and who measured them; any other as it is."""
    if machine.name != "this":
        return machine
    found = {name: entry for name, entry in _mapping(_known(machine).get("rates")).items() if name in RATES}
    values: dict[str, Any] = {}
    sources = dict(machine.sources)
    for name, entry in found.items():
        rate = _mapping(entry).get("value")
        if isinstance(rate, int | float) and _believable(machine, name, rate):
            values[name] = float(rate)
            sources[name] = f"measured: {entry.get('source') or 'on this machine'}"
    return replace(machine, **values, sources=sources) if values else machine


def constants_for(machine: Machine) -> Constants:
    """Measured ones for this machine; what is assumed for any other."""
    known = _known(machine) if machine.name == "this" else {}
    context = known.get("context")
    if not isinstance(context, int):
        return Constants()
    note = f"as {known.get('run', 'a run')} left it on this machine"
    return replace(Constants(), context=context, context_note=note)


def remember_context(machine: Machine, context: int, run: str) -> None:
    _keep(machine, {**_known(machine), "context": context, "run": run})


def _believable(machine: Machine, name: str, rate: float) -> bool:
    assumed = float(getattr(machine, name))
    return isfinite(rate) and assumed / BELIEVED <= rate <= assumed * BELIEVED


def _known(machine: Machine) -> Mapping[str, Any]:
    return _mapping(user_cache.load(_KIND, _entry(machine)))


def _keep(machine: Machine, content: Mapping[str, Any]) -> None:
    user_cache.store(_KIND, _entry(machine), {**content, "machine": machine.title})


def _entry(machine: Machine) -> str:
    """By the device's name: a home folder may be shared by a login node and by nodes of several kinds."""
    return "machine-" + hashlib.blake2b(machine.title.encode(), digest_size=8).hexdigest()


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}
