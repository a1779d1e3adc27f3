"""The same run in every bucket of its data, and on more nodes. Pure.

Two shapes are traced, the others lie on a line between them: bytes grow with the area of a latent, or stay; operations
grow faster, where attention looks at everything. Between the smallest and the largest shape a line is therefore at or
above what is true, never below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simpletuner_gh200.config.job import Job
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.plan.data import SampleShape
from simpletuner_gh200.plan.evaluation import Evaluated, evaluate
from simpletuner_gh200.plan.facts import RunFacts, Source
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import place
from simpletuner_gh200.plan.sizes import ModelSizes, ends, takes_checkpointed_steps
from simpletuner_gh200.plan.steps import STEPS_IN_FP32, refuses_fp32
from simpletuner_gh200.plan.traces import Trace
from simpletuner_gh200.seams.trace.counted import Counted
from simpletuner_gh200.units import counted

# -- buckets -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Of one shape, one micro-batch on one rank."""

    shape: SampleShape
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


def buckets(facts: RunFacts, sizes: ModelSizes, machine: Machine) -> tuple[Bucket, ...]:
    """From the largest down; none where nothing was traced."""
    largest_first = sorted(sizes.shapes, key=lambda shape: (-shape.area, shape.height)) if sizes.traces else ()
    return tuple(_bucket(shape, facts, sizes, machine) for shape in largest_first)


def _bucket(shape: SampleShape, facts: RunFacts, sizes: ModelSizes, machine: Machine) -> Bucket:
    found, note = _sizes_of(shape, sizes, checkpointed=takes_checkpointed_steps(facts, machine))
    placed = place(facts, found, machine)
    return Bucket(
        shape=shape,
        samples=sizes.shapes[shape],
        hbm=placed.transient,
        grace=placed.offloaded,
        flops=placed.step.flops,
        source=placed.step.source,
        note=note,
    )


def _sizes_of(shape: SampleShape, sizes: ModelSizes, *, checkpointed: bool) -> tuple[ModelSizes, str]:
    smallest, largest = ends(sizes.shapes)
    if shape.area == largest.area:
        return sizes, "scaled" if sizes.guessed else "traced"
    high = sizes.traces.get(checkpointed)
    if sizes.smallest is None or high is None:
        return replace(sizes, traced_batch=sizes.traced_batch * largest.area / shape.area, guessed=True), "scaled"
    share = (shape.area - smallest.area) / (largest.area - smallest.area)
    note = "traced" if shape.area == smallest.area else "on a line between two that were traced"
    return replace(sizes, traces={checkpointed: between(sizes.smallest, high, share)}), note


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


def usual_flops(found: Iterable[Bucket]) -> float | None:
    """Operations of a micro-batch over the whole dataset: each bucket as often as it has samples."""
    known = [(bucket.flops, bucket.samples or 1) for bucket in found if bucket.source == "computed"]
    total = sum(samples for _flops, samples in known)
    return sum(flops * samples for flops, samples in known) / total if total else None


# -- nodes -------------------------------------------------------------------------------------------------

COMPARED_NODES = (1, 2, 4, 8)
"""That a plan looks at, whatever was requested."""


@dataclass(frozen=True)
class OnNodes:
    """A run on so many nodes. ``needs``: settings that the configuration has not, and that were taken for granted."""

    nodes: int
    evaluated: Evaluated
    needs: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        return self.evaluated.fits

    def to_json(self) -> dict[str, Any]:
        found = self.evaluated
        return {
            "nodes": self.nodes,
            "ranks": found.facts.ranks,
            "sharded": found.facts.sharded,
            "needs": dict(self.needs),
            "fits": self.fits,
            "weights": found.placed.step.weights,
            "hbm": found.used("hbm"),
            "grace": found.used("grace"),
            "step": found.step_json(),
        }


def spread(job: Job, *, ranks: int | None, nodes: int | None, most: int | None = None) -> Job:
    """As requested; what is not, is the configuration's, or follows from the ``most`` ranks that a node can have.

    More nodes have as many ranks each as the configuration puts on one.
    """
    count = nodes or job.nodes
    if nodes is None and most is not None:
        count = max(count, -(-(ranks or job.ranks) // most))
        ranks = ranks or job.ranks
    if ranks is not None and ranks % count:
        raise UsageError(
            f"--ranks {ranks}: not the same number on each of {count} nodes",
            remedy="name the ranks of all nodes together, a multiple of --nodes",
        )
    return replace(job, ranks=ranks or max(job.ranks // job.nodes, 1) * count, nodes=count)


def node_of(machine: Machine, job: Job) -> Machine:
    """The node that a job needs: a published machine is one superchip of it, this machine is a whole node."""
    per_node = job.ranks // job.nodes
    if machine.name != "this" and machine.devices == 1:
        return replace(machine, devices=per_node, grace=machine.grace * per_node)
    if machine.has_device and job.nodes > 1 and per_node > machine.devices:
        raise UsageError(
            f"{per_node} ranks a node, and {machine.title} has {machine.devices} GPUs",
            remedy="lower --ranks, or name another --machine",
        )
    return machine


def too_many(machine: Machine, job: Job) -> str | None:
    """Why no node of this machine holds the ranks that are to be on one."""
    per_node = job.ranks // job.nodes
    if machine.most_devices is None or per_node <= machine.most_devices:
        return None
    return f"{per_node} ranks a node, and a node of {machine.title} has {counted(machine.most_devices, 'GPU')} at most"


def on_nodes(facts: Callable[[int], RunFacts], sizes: ModelSizes, machine: Machine, job: Job) -> Iterator[OnNodes]:
    """The run on each number of nodes; all weights are trained in shards as soon as there are several ranks.

    ``facts``: the run's by its number of ranks. ``machine``: of one rank of such a node.
    """
    for nodes in sorted({*COMPARED_NODES, job.nodes}):
        found = facts(nodes * (job.ranks // job.nodes))
        needs: dict[str, Any] = {}
        if found.full and found.ranks > 1 and not found.sharded:
            found, needs = replace(found, sharded=True), {"fsdp_enable": True, "fsdp_version": 2}
        if refuses_fp32(found):
            found, needs = replace(found, optimizer=STEPS_IN_FP32), {**needs, "optimizer": STEPS_IN_FP32}
        yield OnNodes(nodes, evaluate(found, sizes, machine), needs)


def fewest(found: Sequence[OnNodes]) -> OnNodes | None:
    """The smallest number of nodes that holds the run."""
    return next((one for one in found if one.fits), None)
