"""How much of what a run reads from its caches is in memory, step by step, as its records tell. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from simpletuner_gh200.telemetry.reading import Recorded


class Counts(NamedTuple):
    """Of one cache, since the run began."""

    hits: float
    misses: float
    held: float
    """Bytes."""


def cache_counts(run: Recorded) -> dict[str, list[Counts]]:
    """By cache, for each step that tells of it."""
    told: dict[str, list[Counts]] = {}
    for step in run.steps:
        for name, counts in _of_step(step).items():
            told.setdefault(name, []).append(counts)
    return told


def shares_in_memory(run: Recorded) -> list[float]:
    """For each step that read anything: the share of its reads, over all caches, that memory answered."""
    totals = [tuple(map(sum, zip(*found, strict=True))) for step in run.steps if (found := _of_step(step).values())]
    shares = []
    for before, after in pairwise([(0.0, 0.0, 0.0), *totals]):
        hits, misses = after[0] - before[0], after[1] - before[1]
        if hits >= 0 and misses >= 0 and hits + misses > 0:
            shares.append(hits / (hits + misses))
    return shares


def _of_step(step: dict[str, Any]) -> dict[str, Counts]:
    features = step.get("features")
    caches = features.get("caches") if isinstance(features, dict) else None
    read = {name: _counts(told) for name, told in (caches if isinstance(caches, dict) else {}).items()}
    return {name: counts for name, counts in read.items() if counts is not None}


def _counts(told: object) -> Counts | None:
    values = [told.get(name) for name in ("hits", "misses", "held_bytes")] if isinstance(told, dict) else []
    numbers = [value for value in values if isinstance(value, int | float)]
    return Counts(*numbers) if len(numbers) == 3 else None
