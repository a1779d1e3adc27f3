"""The numbers of a run, each named once: the terminal, the report and the Web UI's panel all show these.

One more number for all three is one more row of ``NUMBERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean, median
from typing import Any, Literal, NamedTuple

from simpletuner_gh200.telemetry.reading import Point, Recorded
from simpletuner_gh200.units import format_bytes, format_seconds

Step = dict[str, Any]


def plain(value: float) -> str:
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{value * 100:.3g} %"


# -- reads from caches -----------------------------------------------------------------------------------------


class Reads(NamedTuple):
    """Of one cache, since the run began."""

    hits: float
    misses: float
    held: float
    """Bytes."""


def cache_reads(step: Step) -> dict[str, Reads]:
    """By cache, as a step's record has them."""
    features = step.get("features")
    caches = features.get("caches") if isinstance(features, dict) else None
    found = {}
    for name, counts in caches.items() if isinstance(caches, dict) else ():
        values = [counts.get(key) for key in ("hits", "misses", "held_bytes")] if isinstance(counts, dict) else []
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == 3:
            found[name] = Reads(*numbers)
    return found


def hit_rate(before: Reads, after: Reads) -> float | None:
    """The share of the reads between two moments that memory answered; None where there were none."""
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return hits / (hits + misses) if hits >= 0 and misses >= 0 and hits + misses > 0 else None


def hit_rates(run: Recorded, cache: str | None = None) -> list[Point]:
    """By step, of one cache or of all together."""

    def total(step: Step) -> Reads:
        found = [counts for name, counts in cache_reads(step).items() if cache in (None, name)]
        return Reads(*(sum(column) for column in zip(*found, strict=True))) if found else Reads(0, 0, 0)

    return run.curve(("hit rate", cache), lambda step, before: hit_rate(total(before), total(step)))


def data_wait_shares(run: Recorded) -> list[Point]:
    """By step: the share of it, saving left out, that was spent waiting for data."""

    def share(step: Step, _before: Step) -> float | None:
        whole, wait, saving = (step.get(name) for name in ("step_seconds", "data_wait_seconds", "save_seconds"))
        if not isinstance(whole, int | float) or not isinstance(wait, int | float):
            return None
        rest = whole - (saving if isinstance(saving, int | float) else 0.0)
        return wait / rest if rest > 0 else None

    return run.curve("share of data wait", share)


# -- all of them -----------------------------------------------------------------------------------------------


class Number(NamedTuple):
    title: str
    of: str | Callable[[Recorded], list[Point]]
    """A path in the step records, or a curve."""
    unit: Callable[[float], str]
    whole: Literal["last", "median", "mean", "least", "most"] = "last"
    """What stands for the whole run."""

    def curve(self, run: Recorded) -> list[Point]:
        return run.series(self.of) if isinstance(self.of, str) else self.of(run)

    def of_the_run(self, values: list[float]) -> str:
        """The first step is left out of medians and means: it pays for the others' warm-up."""
        if self.whole in ("median", "mean"):
            return self.unit((median if self.whole == "median" else mean)(values[1:] or values))
        return self.unit({"last": values[-1], "least": min(values), "most": max(values)}[self.whole])


NUMBERS = (
    Number("loss", "loss", plain),
    Number("learning rate", "learning_rate", plain),
    Number("step time", "step_seconds", format_seconds, "median"),
    Number("data wait", "data_wait_seconds", format_seconds, "median"),
    Number("share of data wait", data_wait_shares, percent, "mean"),
    Number("samples/s", "samples_per_second", plain, "median"),
    Number("effective batch", "effective_batch", plain),
    Number("cache hits", hit_rates, percent),
    Number("pictures cached, /s", "features/caching/pictures_per_second", plain),
    Number("host memory available", "host/available", format_bytes, "least"),
    Number("process memory", "host/resident", format_bytes, "most"),
    Number("slabs", "slab_bytes", format_bytes, "most"),
    Number("HBM in use", "device/used", format_bytes, "most"),
    Number("link to the GPU, /s", "device/link_in_per_second", format_bytes, "most"),
    Number("model state in Grace", "features/state/bytes", format_bytes, "most"),
    Number("reserve in use", "features/state/oom_reserve/most", format_bytes, "most"),
    Number("times the reserve was in use", "features/state/oom_reserve/times", plain),
    Number("weights copied in", "features/weights/streamed", format_bytes),
    Number("gradients in Grace", "features/gradients/bytes", format_bytes, "most"),
    Number("activations moved", "features/activations/moved_bytes", format_bytes),
    Number("lost to checkpoints", "features/behind/stall_seconds", format_seconds),
    Number("drained to disk behind", "features/behind/drain_seconds", format_seconds),
    Number("age of the last checkpoint on disk", "features/behind/safe_age", format_seconds, "most"),
)


def numbers_of(run: Recorded) -> Iterator[tuple[Number, list[Point]]]:
    """Those that the run has recorded, with their curves."""
    return ((number, points) for number in NUMBERS if (points := number.curve(run)))
