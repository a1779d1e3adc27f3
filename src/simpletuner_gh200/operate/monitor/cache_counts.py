"""How much of what a run reads from its caches is in memory, step by step, as its records tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from simpletuner_gh200.telemetry.reading import Recorded


class Counts(NamedTuple):
    """Of one cache, since the run began."""

    hits: float
    misses: float
    held: float
    """Bytes."""


def cache_counts(steps: Sequence[dict[str, Any]]) -> dict[str, list[Counts]]:
    """By cache, for each step that tells of it."""
    told: dict[str, list[Counts]] = {}
    for step in steps:
        for name, counts in _of_step(step).items():
            told.setdefault(name, []).append(counts)
    return told


def shares_in_memory(run: Recorded, latest: int) -> list[float]:
    """For each of the ``latest`` steps that read anything: the share of its reads, over all caches, in memory."""
    steps = run.steps[-latest - 1 :]
    totals = [tuple(map(sum, zip(*found, strict=True))) for step in steps if (found := _of_step(step).values())]
    before_any = [(0.0, 0.0, 0.0)] if len(steps) == len(run.steps) else []
    shares = []
    for before, after in pairwise([*before_any, *totals]):
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
