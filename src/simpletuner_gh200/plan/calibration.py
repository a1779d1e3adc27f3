"""What runs and measurements on this machine found out: it takes the place of what is cited or assumed of it.

*Rates* are operations, samples and bytes per second, as a run or a command that measures saw them; no refusal rests on
a rate. *Context* is what a device held beyond what torch had reserved at the same moment; both were measured, nothing
planned is in it. Others on the device are in it too, so it stays assumed where a run might be refused for it.

Everybody who measures calls ``remember``; everybody who plans is handed a ``calibrated`` machine. The rest is pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median
from typing import Any

from simpletuner_gh200.plan.machines import RATES, Machine
from simpletuner_gh200.telemetry.reading import dig
from simpletuner_gh200.units import GIB, MIB
from simpletuner_gh200.upstream import user_cache

_KIND = "plan"
"""In the user's cache."""

MEASURABLE = (*RATES, "context")

BELIEVED = 100
"""A value that is so many times higher or lower than the one that was assumed is a mistake of whoever measured it."""

LARGEST_CONTEXT = 8 * GIB
"""More than this is somebody else's, not a context."""

WARMING = 2
"""Steps at a run's beginning that say nothing about the others: kernels are chosen, memory is taken."""

FEWEST = 5
"""Steps that make a median."""

WAITED = 0.1
"""Share of a step: where more of it was spent waiting for data, it was not the device that was measured."""

LEAST_STAGED = 256 * MIB
"""Less is read too quickly to tell a rate."""


def remember(machine: Machine, measured: Mapping[str, float | None], source: str) -> None:
    """Keep what was measured of this machine for its next plans; ``source`` says who measured (a run, a command).

    Names are those of ``MEASURABLE``, in bytes, operations or samples per second. None: could not be measured.
    """
    unknown = sorted(measured.keys() - set(MEASURABLE))
    if unknown:
        raise ValueError(f"no rate of a machine: {', '.join(unknown)}; there are {', '.join(MEASURABLE)}")
    found = {
        name: {"value": value, "source": source}
        for name, value in measured.items()
        if value is not None and _believable(machine, name, value)
    }
    if found:
        content = {"machine": machine.title, "rates": {**_known(machine), **found}}
        user_cache.store(_KIND, _entry(machine), content)


def calibrated(machine: Machine) -> Machine:
    """This machine with what was measured on it, and who measured; any other as it is."""
    if machine.name != "this":
        return machine
    values: dict[str, Any] = {}
    known, sources = _known(machine), dict(machine.sources)
    for name in MEASURABLE:
        value = _number(known, f"{name}/value")
        if value is not None and _believable(machine, name, value):
            values[name] = int(value) if name == "context" else value
            sources[name] = f"measured: {dig(known, f'{name}/source') or 'on this machine'}"
    return replace(machine, **values, sources=sources) if values else machine


def _believable(machine: Machine, name: str, value: float) -> bool:
    assumed = float(getattr(machine, name))
    return isfinite(value) and assumed / BELIEVED <= value <= assumed * BELIEVED


def _known(machine: Machine) -> dict[str, Any]:
    return _inside({"kept": user_cache.load(_KIND, _entry(machine))}, "kept/rates")


def _entry(machine: Machine) -> str:
    """By the device's name: a home folder may be shared by a login node and by nodes of several kinds."""
    return "machine-" + hashlib.blake2b(machine.title.encode(), digest_size=8).hexdigest()


# -- what a run's records tell -----------------------------------------------------------------------------


def learned_context(moments: Iterable[tuple[int, int]]) -> int | None:
    """Of (used on the device, reserved by torch) at some moments; None where that is no sensible figure."""
    beyond = [used - reserved for used, reserved in moments]
    usual = int(median(beyond)) if beyond else 0
    return usual if 0 < usual <= LARGEST_CONTEXT else None


def learned_flops(of_micro_batch: float | None, steps: Sequence[dict[str, Any]]) -> float | None:
    """Operations per second that the device reached, from the operations that a plan counted."""
    return _usual(_reached(of_micro_batch, step) for step in steps[WARMING:]) if of_micro_batch else None


def _reached(each: float, step: dict[str, Any]) -> float | None:
    seconds, waited, batches = (_number(step, name) for name in ("step_seconds", "data_wait_seconds", "micro_batches"))
    if seconds is None or waited is None or batches is None or waited > WAITED * seconds:
        return None
    working = seconds - sum(_number(step, name) or 0.0 for name in ("save_seconds", "other_seconds"))
    return each * batches / working if working > 0 and batches else None


def learned_samples(steps: Sequence[dict[str, Any]], ranks: int) -> float | None:
    """Samples per second that the data side of one rank hands over while nothing else is done."""
    return _usual(_handed(step, ranks) for step in steps[WARMING:])


def _handed(step: dict[str, Any], ranks: int) -> float | None:
    names = ("step_seconds", "data_wait_seconds", "samples_per_second")
    seconds, waited, rate = (_number(step, name) for name in names)
    return rate * seconds / ranks / waited if seconds and waited and rate else None


def measured_by_features(details: dict[str, Any]) -> dict[str, float | None]:
    """The rates that features of ours measured when they started, from a run's summary."""
    staged = [_staged(one) for one in _inside(details, "store").values() if isinstance(one, dict)]
    link = {way: _number(details, f"activations/link/{way}") for way in ("h2d", "d2h")}
    return {**link, "disk_rate": max((rate for rate in staged if rate is not None), default=None)}


def _staged(dataset: dict[str, Any]) -> float | None:
    """Bytes per second of files read as they are; the kernel may have had some of them in memory."""
    size, seconds = _number(dataset, "bytes"), _number(dataset, "seconds")
    as_they_are = _inside(dataset, "codecs").keys() == {"raw"}
    return size / seconds if as_they_are and size and seconds and size >= LEAST_STAGED else None


def _usual(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if len(found) >= FEWEST else None


def _number(values: dict[str, Any], name: str) -> float | None:
    value = dig(values, name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _inside(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = dig(values, name)
    return found if isinstance(found, dict) else {}
