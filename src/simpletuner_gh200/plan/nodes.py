"""A run over several nodes: which ranks share one, and what more of them would hold. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simpletuner_gh200.config.job import Job
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.plan.changes import Evaluated, Situation, evaluate
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.sharding import STEPS_IN_FP32, refuses_fp32

LOOKED_AT = (1, 2, 4, 8)
"""Nodes that a plan compares, whatever was asked for."""


@dataclass(frozen=True)
class Spread:
    """Nodes, and the ranks on each."""

    nodes: int
    beside: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.beside


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
        placed, facts = self.evaluated.placed, self.evaluated.facts
        return {
            "nodes": self.nodes,
            "ranks": facts.ranks,
            "sharded": facts.sharded,
            "needs": dict(self.needs),
            "fits": self.fits,
            "weights": placed.step.weights,
            "hbm": placed.table.used("hbm"),
            "grace": placed.table.used("grace"),
            "step": {"bounds": dict(self.evaluated.bounds.seconds), "binding": self.evaluated.bounds.binding},
        }


def spread_of(job: Job, *, ranks: int | None, nodes: int | None) -> Spread:
    """As asked; what is not asked is the configuration's.

    More nodes have as many ranks each as the configuration puts on one.
    """
    beside = max(job.ranks // job.nodes, 1)
    count = nodes or job.nodes
    if ranks is None:
        return Spread(count, beside)
    if ranks % count:
        raise UsageError(
            f"--ranks {ranks}: not the same number on each of {count} nodes",
            remedy="name the ranks of all nodes together, a multiple of --nodes",
        )
    return Spread(count, ranks // count)


def node_of(machine: Machine, spread: Spread) -> Machine:
    """The node that ``spread`` needs: a published machine is one superchip of it, this machine is a whole node."""
    if machine.name != "this" and machine.devices == 1:
        return replace(machine, devices=spread.beside, grace=machine.grace * spread.beside)
    if machine.has_device and spread.nodes > 1 and spread.beside > machine.devices:
        raise UsageError(
            f"{spread.beside} ranks a node, and {machine.title} has {machine.devices} GPUs",
            remedy="lower --ranks, or name another --machine",
        )
    return machine


def on_nodes(facts: Callable[[int], RunFacts], situation: Situation, spread: Spread) -> Iterator[OnNodes]:
    """The run on each number of nodes; all weights are trained in shards as soon as there are several ranks.

    ``facts``: the run's by its number of ranks. ``situation``: of one rank of such a node.
    """
    for nodes in sorted({*LOOKED_AT, spread.nodes}):
        found = facts(nodes * spread.beside)
        needs: dict[str, Any] = {}
        if found.full and found.ranks > 1 and not found.sharded:
            found, needs = replace(found, sharded=True), {"fsdp_enable": True, "fsdp_version": 2}
        if refuses_fp32(found):
            found, needs = replace(found, optimizer=STEPS_IN_FP32), {**needs, "optimizer": STEPS_IN_FP32}
        yield OnNodes(nodes, evaluate(found, situation), needs)


def fewest(found: Sequence[OnNodes]) -> OnNodes | None:
    """The smallest number of nodes that holds the run."""
    return next((one for one in found if one.fits), None)
