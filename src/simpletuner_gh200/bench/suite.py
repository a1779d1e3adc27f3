"""A benchmark suite, and measuring fairly on a noisy machine: candidates interleaved, medians over repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.registry import contributions


@dataclass(frozen=True)
class Suite:
    """Exported as ``SUITE`` by one file in ``bench/suites``; ``gh200 bench NAME`` runs it.

    ``measure(quick)`` returns a nested dict; keys that are there stay, more are welcome. ``quick`` asks for
    sizes small enough for a test that only looks at the shape of the result.
    """

    name: str
    help: str
    measure: Callable[[bool], dict[str, Any]]
    measure_samples: Callable[[bool, int], dict[str, Any]] | None = None
    """The same with so many samples, where that can be asked for."""

    def run(self, quick: bool, samples: int | None) -> dict[str, Any]:
        if samples is None:
            return self.measure(quick)
        if self.measure_samples is None:
            raise UsageError(f"suite {self.name!r} has no --samples", remedy="leave it out")
        return self.measure_samples(quick, samples)


def all_suites() -> dict[str, Suite]:
    """Every suite, by name."""
    return {suite.name: suite for suite in contributions("simpletuner_gh200.bench.suites", "SUITE", Suite)}


def find_suite(name: str) -> Suite:
    suites = all_suites()
    if name not in suites:
        raise UsageError(f"no benchmark suite {name!r}", remedy=f"accepted: {', '.join(suites)}")
    return suites[name]


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each candidate by ``clock``; every round runs all of them, so that noise hits them alike."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, candidate in candidates.items():
            started = clock()
            candidate()
            taken[name].append(clock() - started)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
