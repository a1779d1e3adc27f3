"""What a step takes in each bucket of a run: two shapes are traced, the others lie on a line between them. Pure.

Bytes grow with the area of a latent, or stay; operations grow faster, where attention looks at everything. Between the
smallest and the largest shape a line is therefore at or above what is true, never below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from simpletuner_gh200.plan.beside import Constants
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import place
from simpletuner_gh200.plan.rows import Source
from simpletuner_gh200.plan.shapes import Shape
from simpletuner_gh200.plan.sizes import Sizes
from simpletuner_gh200.plan.traces import Trace
from simpletuner_gh200.seams.trace.counted import Counted


@dataclass(frozen=True)
class Bucket:
    """Of one shape, one micro-batch on one rank."""

    shape: Shape
    samples: int
    """0 where nobody counted them."""
    hbm: int
    """What the step takes in HBM beyond weights and gradients."""
    grace: int
    flops: float
    source: Source
    note: str

    def to_json(self) -> dict[str, Any]:
        size = {"height": self.shape.height, "width": self.shape.width, "frames": self.shape.frames or None}
        return {**size, **{key: value for key, value in vars(self).items() if key != "shape"}}


def ends(shapes: Iterable[Shape]) -> tuple[Shape, Shape]:
    """(smallest, largest): what is traced."""
    found = sorted(shapes, key=lambda shape: (shape.area, shape.height))
    return found[0], found[-1]


def between(low: Trace, high: Trace, share: float) -> Trace:
    """A step on the line from ``low`` to ``high``, at ``share`` of the way."""
    stacks = {
        name: replace(stack, each=_between(low.stacks[name].each, stack.each, share))
        for name, stack in high.stacks.items()
    }
    return replace(high, base=_between(low.base, high.base, share), stacks=stacks)


def _between(low: Counted, high: Counted, share: float) -> Counted:
    pairs = ((name, value, getattr(high, name)) for name, value in vars(low).items())
    return Counted(**{name: round(first + share * (last - first)) for name, first, last in pairs})


@dataclass(frozen=True)
class Traced:
    """Both ends of a run's shapes; ``low`` None: the smallest was not traced, and sizes are scaled by area."""

    counts: Mapping[Shape, int]
    checkpointed: bool
    low: Trace | None = None


def buckets(known: Traced, facts: RunFacts, sizes: Sizes, machine: Machine, constants: Constants) -> tuple[Bucket, ...]:
    """From the largest down; none where nothing was traced."""
    if not sizes.traces:
        return ()
    largest_first = sorted(known.counts, key=lambda shape: (-shape.area, shape.height))
    return tuple(_bucket(shape, known, facts, sizes, machine, constants) for shape in largest_first)


def _bucket(
    shape: Shape, known: Traced, facts: RunFacts, sizes: Sizes, machine: Machine, constants: Constants
) -> Bucket:
    found, note = _sizes(shape, known, sizes)
    placed = place(facts, found, machine, constants)
    return Bucket(
        shape=shape,
        samples=known.counts[shape],
        hbm=placed.transient,
        grace=placed.mix.offloaded if placed.mix is not None else 0,
        flops=placed.step.flops,
        source=placed.step.source,
        note=note,
    )


def _sizes(shape: Shape, known: Traced, sizes: Sizes) -> tuple[Sizes, str]:
    smallest, largest = ends(known.counts)
    if shape.area == largest.area:
        return sizes, "scaled" if sizes.guessed else "traced"
    if known.low is None or sizes.guessed:
        return replace(sizes, traced_batch=sizes.traced_batch * largest.area / shape.area, guessed=True), "scaled"
    share = (shape.area - smallest.area) / (largest.area - smallest.area)
    trace = between(known.low, sizes.traces[known.checkpointed], share)
    note = "traced" if shape.area == smallest.area else "on a line between two that were traced"
    return replace(sizes, traces={known.checkpointed: trace}), note


def usual_flops(found: Iterable[Bucket]) -> float | None:
    """Operations of a micro-batch over the whole dataset: each bucket as often as it has samples."""
    counted = [(bucket.flops, bucket.samples or 1) for bucket in found if bucket.source == "computed"]
    total = sum(samples for _flops, samples in counted)
    return sum(flops * samples for flops, samples in counted) / total if total else None
