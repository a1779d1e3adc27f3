"""Two recorded runs, metric by metric: better, same or worse, by more than their own noise. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, stdev
from typing import Any, Literal

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import format_bytes

Judgement = Literal["better", "same", "worse", "unknown"]

BLOCKS = 10
"""Neighbouring steps are alike (a busy neighbour slows many in a row), so noise is measured between blocks of them."""
WARM_UP = 0.1
FEWEST = 4
"""Steps, after the warm-up, below which nothing can be said."""
CERTAIN = 2.0
"""So many standard errors must lie beyond the tolerance."""


@dataclass(frozen=True)
class Metric:
    """What is compared. ``share`` metrics are compared by their difference, others by their ratio."""

    name: str
    series: Callable[[Recorded], list[float]]
    more_is_better: bool
    share: bool = False


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float
    """Standard error, from the spread between blocks."""
    steps: int


@dataclass(frozen=True)
class Comparison:
    """``change`` is relative to the first run (for shares: the difference); ``error`` is its standard error."""

    metric: str
    before: float | None
    after: float | None
    change: float | None
    error: float | None
    judgement: Judgement
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def shown(self, value: float | None) -> str:
        return "-" if value is None else in_words(self.metric, value)

    @property
    def words(self) -> str:
        """The change, or why there is none."""
        return f"{self.change:+.1%} ± {self.error:.1%}" if self.change is not None else self.reason


BYTES = " (bytes)"
"""At the end of a metric's name."""


def in_words(metric: str, value: float) -> str:
    """A value of ``metric``, for people."""
    return format_bytes(value) if metric.endswith(BYTES) else f"{value:.4g}"


def compare(before: Recorded, after: Recorded, tolerance: float) -> list[Comparison]:
    """Every metric that could be compared, and those that could not, with the reason."""
    return [_compare(metric, before, after, tolerance) for metric in METRICS]


def regressed(found: Sequence[Comparison]) -> bool:
    return any(row.judgement == "worse" for row in found)


def estimate(values: Sequence[float]) -> Estimate | None:
    """The median after warm-up, and how sure it is; None where there are too few steps."""
    settled = list(values[math.ceil(len(values) * WARM_UP) :])
    if len(settled) < FEWEST:
        return None
    count = min(BLOCKS, len(settled) // 2)
    size = len(settled) / count
    blocks = [median(settled[round(n * size) : round((n + 1) * size)]) for n in range(count)]
    return Estimate(median(settled), stdev(blocks) / math.sqrt(count), len(settled))


def parse_tolerance(text: str) -> float:
    """``5%`` and ``0.05`` are the same."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise UsageError(f"--tolerance {text!r} is not a share", remedy="write 5% or 0.05, below 100%")
    return value


def _compare(metric: Metric, before: Recorded, after: Recorded, tolerance: float) -> Comparison:
    old, new = estimate(metric.series(before)), estimate(metric.series(after))
    if old is None or new is None:
        which = "the first" if old is None else "the second"
        values = (old.value if old else None, new.value if new else None)
        return Comparison(
            metric.name, *values, None, None, "unknown", f"{which} run has too few steps with this number"
        )
    if not metric.share and old.value == 0:
        return Comparison(metric.name, old.value, new.value, None, None, "unknown", "the first run has none of it")
    change, error = _change(metric, old, new)
    return Comparison(metric.name, old.value, new.value, change, error, _judge(metric, change, error, tolerance))


def _change(metric: Metric, old: Estimate, new: Estimate) -> tuple[float, float]:
    if metric.share:
        return new.value - old.value, math.hypot(old.error, new.error)
    ratio = new.value / old.value
    spread = math.hypot(old.error / old.value, new.error / new.value if new.value else 0.0)
    return ratio - 1, abs(ratio) * spread


def _judge(metric: Metric, change: float, error: float, tolerance: float) -> Judgement:
    beyond = abs(change) - CERTAIN * error > tolerance
    if not beyond:
        return "same"
    return "better" if (change > 0) == metric.more_is_better else "worse"


def _numbers(name: str) -> Callable[[Recorded], list[float]]:
    return lambda run: [value for _step, value in run.series(name)]


def _wait_share(run: Recorded) -> list[float]:
    whole = dict(run.series("step_seconds"))
    return [wait / whole[step] for step, wait in run.series("data_wait_seconds") if whole.get(step)]


METRICS = (
    Metric("throughput (samples/s)", _numbers("samples_per_second"), more_is_better=True),
    Metric("data wait (share of a step)", _wait_share, more_is_better=False, share=True),
    Metric("HBM in use (bytes)", _numbers("device/used"), more_is_better=False),
    Metric("memory of the process (bytes)", _numbers("host/resident"), more_is_better=False),
)


def described(run: Recorded) -> dict[str, dict[str, Any] | None]:
    """What ``describe`` finds, for scripts."""
    return {name: asdict(found) if found else None for name, found, _mean in describe(run)}


def describe(run: Recorded) -> list[tuple[str, Estimate | None, float | None]]:
    """(metric, estimate, mean) of one run, for its report."""
    return [(m.name, estimate(m.series(run)), mean(m.series(run)) if m.series(run) else None) for m in METRICS]
