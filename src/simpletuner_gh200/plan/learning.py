"""What a run's records tell about the machine it ran on. Pure; where it is kept is ``calibration``'s business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from simpletuner_gh200.units import GIB, MIB

MOST = 8 * GIB
"""More than this is somebody else's, not a context."""

WARMING = 2
"""Steps at a run's beginning that say nothing about the others: kernels are chosen, memory is taken."""

FEWEST = 5
"""Steps that make a median."""

WAITED = 0.1
"""Share of a step: where more of it was spent waiting for data, it was not the device that was measured."""

LEAST_STAGED = 256 * MIB
"""Less is read too quickly to tell a rate."""


def learned_context(moments: Iterable[tuple[int, int]]) -> int | None:
    """Of (used on the device, reserved by torch) at some moments; None where that is no sensible figure."""
    beyond = [used - reserved for used, reserved in moments]
    if not beyond:
        return None
    usual = int(median(beyond))
    return usual if 0 < usual <= MOST else None


def learned_flops(of_micro_batch: float | None, steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Operations per second that the device reached, from the operations that a plan counted."""
    if not of_micro_batch:
        return None
    return _usual(_reached(of_micro_batch, step) for step in steps[WARMING:])


def _reached(each: float, step: Mapping[str, Any]) -> float | None:
    seconds, waited, batches = (_number(step, name) for name in ("step_seconds", "data_wait_seconds", "micro_batches"))
    if seconds is None or waited is None or batches is None or waited > WAITED * seconds:
        return None
    working = seconds - sum(_number(step, name) or 0.0 for name in ("save_seconds", "other_seconds"))
    return each * batches / working if working > 0 and batches else None


def learned_samples(steps: Sequence[Mapping[str, Any]], ranks: int) -> float | None:
    """Samples per second that the data side of one rank hands over while nothing else is done."""
    return _usual(_handed(step, ranks) for step in steps[WARMING:])


def _handed(step: Mapping[str, Any], ranks: int) -> float | None:
    seconds, waited, rate = (
        _number(step, name) for name in ("step_seconds", "data_wait_seconds", "samples_per_second")
    )
    if not seconds or not waited or not rate:
        return None
    return rate * seconds / ranks / waited


def measured_by_features(details: Mapping[str, Any]) -> dict[str, float | None]:
    """The rates that features of ours measured when they started, from a run's summary."""
    link = _inside(_inside(details, "activations"), "link")
    staged = [_staged(one) for one in _inside(details, "store").values() if isinstance(one, Mapping)]
    return {
        "h2d": _number(link, "h2d"),
        "d2h": _number(link, "d2h"),
        "disk_rate": max((rate for rate in staged if rate is not None), default=None),
    }


def _staged(dataset: Mapping[str, Any]) -> float | None:
    """Bytes per second of files read as they are; the kernel may have had some of them in memory."""
    size, seconds = _number(dataset, "bytes"), _number(dataset, "seconds")
    as_they_are = set(_inside(dataset, "codecs")) == {"raw"}
    return size / seconds if as_they_are and size and seconds and size >= LEAST_STAGED else None


def _usual(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if len(found) >= FEWEST else None


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _inside(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}
