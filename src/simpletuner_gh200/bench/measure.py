"""Measuring fairly on a noisy machine: candidates interleaved, medians over repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(candidates: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median wall seconds of each candidate; every round runs all of them, so that noise hits them alike."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, candidate in candidates.items():
            started = time.perf_counter()
            candidate()
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
