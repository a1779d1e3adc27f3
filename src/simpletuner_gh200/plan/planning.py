"""From a configuration to a plan: read, ask, calculate. The cheap way asks nobody and needs no torch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.plan.buckets import Bucket, buckets, usual_flops
from simpletuner_gh200.plan.calibration import calibrated, constants_for
from simpletuner_gh200.plan.changes import Change, Evaluated, Situation, changes, cheapest, evaluate, fastest
from simpletuner_gh200.plan.facts import NOT_FOLLOWED, read_facts, truth
from simpletuner_gh200.plan.machines import RATES, Machine
from simpletuner_gh200.plan.model_files import model_of
from simpletuner_gh200.plan.nodes import OnNodes, node_of, on_nodes, spread_of
from simpletuner_gh200.plan.reading import named, read_sizes
from simpletuner_gh200.plan.rows import PHASES, POOLS, Table
from simpletuner_gh200.plan.sharding import sharding_notes
from simpletuner_gh200.units import format_bytes
from simpletuner_gh200.upstream.flavours import families, flavours_of

_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")
"""What can be downloaded by its name: owner and model, and no path."""


@dataclass(frozen=True)
class Plan:
    machine: Machine
    situation: Situation
    evaluated: Evaluated
    notes: tuple[str, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    """From the largest, which the table is about, down."""
    nodes: tuple[OnNodes, ...] = ()
    """The same run on one node, two and more, with as many ranks on each."""

    @property
    def fits(self) -> bool:
        return self.evaluated.fits

    @property
    def table(self) -> Table:
        return self.evaluated.placed.table

    @cached_property
    def changes(self) -> list[Change]:
        return changes(self.evaluated.facts, self.situation)

    @property
    def advice(self) -> Change | None:
        """What to change: so that it fits, or so that it is faster."""
        return fastest(self.changes) if self.fits else cheapest(self.changes)

    @property
    def traced_flops(self) -> float | None:
        """Operations of one micro-batch; None where they were not traced, or some blocks are computed again."""
        placed = self.evaluated.placed
        return usual_flops(self.buckets) if placed.step.source == "computed" and placed.mix is None else None

    def to_json(self) -> dict[str, Any]:
        table = self.table
        pools = {}
        for pool in POOLS:
            capacity, used = self.machine.capacity(pool), table.used(pool)
            pools[pool] = {"capacity": capacity, "used": used, "free": None if capacity is None else capacity - used}
        bound = self.evaluated.bounds
        return {
            "fits": self.fits,
            "machine": self.machine.name,
            "pools": pools,
            "phases": {phase: {pool: table.held(phase, pool) for pool in POOLS} for phase in PHASES},
            "bytes": [row.to_json() for row in table.rows],
            "buckets": [bucket.to_json() for bucket in self.buckets],
            "step": {"bounds": dict(bound.seconds), "binding": bound.binding, "flops": self.traced_flops},
            "changes": [change.to_json() for change in self.changes],
            "fastest": found.to_json() if (found := fastest(self.changes)) else None,
            "nodes": [found.to_json() for found in self.nodes],
            "unified": sorted(kind for kind, ours in self.evaluated.facts.unified.items() if ours),
            "rates": self.machine.rate_sources,
            "rate_values": {name: getattr(self.machine, name) for name in RATES},
            "notes": list(self.notes),
        }


def make_plan(
    training: Training,
    machine: Machine,
    *,
    ranks: int | None = None,
    nodes: int | None = None,
    trace: bool = True,
    patience: float | None = None,
) -> Plan:
    """``trace`` False: only what was traced before, without torch. ``patience``: seconds for looking at files.

    ``ranks`` are those of all ``nodes``.
    """
    spread = spread_of(training.job, ranks=ranks, nodes=nodes)
    facts = read_facts(training, ranks=spread.ranks)
    if not facts.family:
        raise UsageError("the configuration names no model_family", remedy="set model_family")
    node = node_of(calibrated(machine), spread)
    one = node.of_one_rank(facts.ranks)
    sizes, shapes, notes = read_sizes(training, facts, one, trace=trace, patience=patience)
    situation = Situation(sizes, one, constants_for(one))
    notes += [f"{key}: not followed, a plain step is counted" for key in NOT_FOLLOWED if truth(facts.options.get(key))]
    notes += sharding_notes(facts)
    if training.assumed:
        notes.append("SimpleTuner's options can't be read here: what is not set is assumed to be at its usual defaults")
    found = buckets(shapes, facts, sizes, one, situation.constants)
    others = on_nodes(lambda count: read_facts(training, ranks=count), situation, spread)
    return Plan(one, situation, evaluate(facts, situation), tuple(notes), found, tuple(others))


def unknown_model(plan: Plan) -> UsageError | None:
    """Why a plan says nothing, where its model has no size: whether it fits is then not known."""
    sizes, facts = plan.situation.sizes, plan.evaluated.facts
    if sizes.denoiser.parameters or sizes.traces:
        return None
    known = families()
    if known and facts.family.lower() not in known:
        close = difflib.get_close_matches(facts.family.lower(), known, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted(known))}"
        return UsageError(f"model_family {facts.family!r}: SimpleTuner has no such family", remedy=remedy)
    name = named(facts)
    why = f": {reason}" if (reason := next((n for n in plan.notes if "could not be traced" in n), "")) else ""
    return UsageError(f"nothing is known of the size of {name}{why}", remedy=_where_sizes_are(plan, tried=bool(why)))


def _where_sizes_are(plan: Plan, *, tried: bool) -> str:
    """``tried``: a step of the model was traced, in vain."""
    facts = plan.evaluated.facts
    weights = model_of(facts.options)
    here, download = os.path.isdir(weights), bool(_REPOSITORY.fullmatch(weights))
    if plan.situation.sizes.denoiser.config:
        if not tried:
            return "plan without --no-trace: its configuration is here, and a trace counts it"
        return "its safetensors files tell too" + (f": hf download {weights}" if download and not here else "")
    if here:
        return f"{weights} has no transformer or unet with a config.json: copy it there, or name another folder"
    if download:
        return f"its configuration is enough: hf download {weights} --include '*.json'; or name a folder that has it"
    if not weights and (known := flavours_of(facts.family).repositories):
        return f"set model_flavour, one of {', '.join(known)}; or pretrained_model_name_or_path"
    return "set pretrained_model_name_or_path to a repository, or to a folder that has its configuration"


def refusal(plan: Plan) -> str | None:
    """Why a run can't be, in the plan's words; None where only an assumption stands against it, or nothing does.

    A disk that is too small is no reason: it can be emptied while the run goes on.
    """
    over = {pool: size for pool, size in plan.evaluated.certain_overflow.items() if pool != "disk"}
    if not over:
        return None
    said = []
    for pool, size in over.items():
        phase = plan.table.worst_phase(pool)
        largest = plan.table.largest(phase, pool)
        what = f", most of it {largest.what} ({format_bytes(largest.bytes)})" if largest else ""
        capacity = format_bytes(plan.machine.capacity(pool) or 0)
        used = format_bytes(plan.table.used(pool, certain=True))
        said.append(
            f"{POOL_NAMES[pool]} has {capacity}, {phase} needs at least {used}{what}: {format_bytes(size)} too much"
        )
    return "; ".join(said)


POOL_NAMES: Mapping[str, str] = {"hbm": "HBM", "grace": "CPU memory", "disk": "the disk"}
