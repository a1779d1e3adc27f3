"""A benchmark suite, and the one way to measure fairly on a noisy machine: in turns, medians over repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.registry import contributions


@dataclass(frozen=True)
class Suite:
    """Exported as ``SUITE`` by one file in ``bench/suites``; ``gh200 bench NAME`` runs it.

    ``measure(quick, samples)`` returns a nested dict; keys of the contract stay, more are welcome. ``quick`` asks for
    sizes small enough for a test that only looks at the shape of the result; ``samples`` is None unless somebody asked
    for so many, which only a suite that ``takes_samples`` is handed.
    """

    name: str
    help: str
    measure: Callable[[bool, int | None], dict[str, Any]]
    takes_samples: bool = False
    needs_simpletuner: bool = False

    def run(self, quick: bool, samples: int | None) -> dict[str, Any]:
        if samples is not None and not self.takes_samples:
            raise UsageError(f"suite {self.name!r} has no --samples", remedy="leave it out")
        return self.measure(quick, samples)


def all_suites() -> dict[str, Suite]:
    """Every suite, by name."""
    return {suite.name: suite for suite in contributions("simpletuner_gh200.bench.suites", "SUITE", Suite)}


def find_suite(name: str) -> Suite:
    suites = all_suites()
    if name not in suites:
        raise UsageError(f"no benchmark suite {name!r}", remedy=f"accepted: {', '.join(suites)}")
    return suites[name]


class Medians(NamedTuple):
    """Seconds of each subject: on the wall's clock, of CPU in all threads, of CPU in the measuring thread."""

    wall: dict[str, float]
    cpu: dict[str, float]
    thread: dict[str, float]


def measure(
    subjects: Mapping[str, Callable[[], object]], *, repeats: int, before: Callable[[str], object] | None = None
) -> Medians:
    """Every round runs all subjects, so that noise hits them alike. ``before`` gets a subject's name, and is not timed.

    What a subject returns is held until its time is taken, and then closed if it has a ``close``: giving back is not
    timed either.
    """
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, subject in subjects.items():
            if before is not None:
                before(name)
            began = clocks()
            kept = subject()
            taken[name].append(tuple(now - then for now, then in zip(clocks(), began, strict=True)))
            if hasattr(kept, "close"):
                kept.close()
            del kept
    by_clock = range(len(Medians._fields))
    return Medians(
        *({name: statistics.median(turn[at] for turn in turns) for name, turns in taken.items()} for at in by_clock)
    )


def clocks() -> tuple[float, float, float]:
    """As Medians."""
    return time.perf_counter(), time.process_time(), time.thread_time()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Where CPU time of the measuring thread is compared, torch does its work there as well."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
