"""From a configuration to a plan: read, ask, calculate. The cheap way asks nobody and needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.plan import traces
from simpletuner_gh200.plan.buckets import Bucket, Traced, buckets, ends, usual_flops
from simpletuner_gh200.plan.calibration import calibrated, constants_for
from simpletuner_gh200.plan.changes import Change, Evaluated, Situation, changes, cheapest, evaluate, fastest
from simpletuner_gh200.plan.facts import RunFacts, read_facts
from simpletuner_gh200.plan.machines import RATES, Machine
from simpletuner_gh200.plan.model_files import Component, read_components
from simpletuner_gh200.plan.nodes import OnNodes, node_of, on_nodes, spread_of
from simpletuner_gh200.plan.published import published_traces
from simpletuner_gh200.plan.rows import PHASES, POOLS, Table
from simpletuner_gh200.plan.shapes import Shape, latent_factors, read_data, shapes_of
from simpletuner_gh200.plan.sharding import sharding_notes
from simpletuner_gh200.plan.sizes import Sizes
from simpletuner_gh200.plan.traces import Trace
from simpletuner_gh200.units import format_bytes

EMBED_BYTES = 512 * 4096 * 2
"""Of one cached text embed, where no cache tells: 512 tokens of T5."""


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
    spread = spread_of(training.values, ranks=ranks, nodes=nodes)
    facts = read_facts(training, ranks=spread.ranks)
    if not facts.family:
        raise UsageError("the configuration names no model_family", remedy="set model_family")
    node = node_of(calibrated(machine), spread)
    one = node.of_one_rank(facts.ranks)
    sizes, shapes, notes = read_sizes(training, facts, one, trace=trace, patience=patience)
    situation = Situation(sizes, one, constants_for(one))
    notes += sharding_notes(facts)
    found = buckets(shapes, facts, sizes, one, situation.constants)
    others = on_nodes(lambda count: read_facts(training, ranks=count), situation, spread)
    return Plan(one, situation, evaluate(facts, situation), tuple(notes), found, tuple(others))


def read_sizes(
    training: Training, facts: RunFacts, machine: Machine, *, trace: bool, patience: float | None = None
) -> tuple[Sizes, Traced, list[str]]:
    """What is known of the model, its data and its shapes, and what could not be found out."""
    notes: list[str] = []
    parts = _components(facts, notes)
    denoiser = next((part for part in parts if part.kind == "denoiser"), None)
    if denoiser is None:
        notes.append(f"{facts.family}: neither its files nor a published size are here; its weights are not counted")
        denoiser = Component("transformer", 0, "assumed")
    vae = next((part for part in parts if part.kind == "vae"), None)
    factor, temporal = latent_factors(facts.family, vae.config if vae else None)
    counts = shapes_of(training)
    small, shape = ends(counts)
    latent, least = (one.latent(factor, temporal) for one in (shape, small))
    basis = facts.checkpointing and (facts.activations == "off" or machine.one_pool)
    questions = _questions(facts, denoiser, latent, like="hopper" if machine.has_device else "cpu")
    if "plain" in questions and small.area < shape.area:
        basic = questions["checkpointed" if basis else "plain"]
        questions["smallest"] = {**basic, "latent": list(least)}
    questions.update(_vae_questions(vae, shape))
    questions.update(_count_questions(parts))
    answers = _answers(questions, trace=trace, notes=notes)
    parts = [_counted(part, answers) for part in parts]
    latent_bytes = _elements(latent) * _latent_channels(vae) * 4
    sizes = Sizes(
        denoiser=denoiser,
        data=read_data(training, latent_bytes=latent_bytes, embed_bytes=EMBED_BYTES, patience=patience),
        encoders=tuple(part for part in parts if part.kind == "encoder"),
        vae=next((part for part in parts if part.kind == "vae"), None),
        vae_work=answers.get("vae", {}),
        traces={name: Trace.from_json(answers[key]) for key, name in _BY_CHECKPOINTING.items() if key in answers},
        traced_batch=facts.batch,
        latent_bytes=latent_bytes,
        embed_bytes=EMBED_BYTES,
    )
    if not sizes.traces:
        sizes = _with_published(sizes, facts, shape)
        if sizes.guessed:
            notes.append("activations are those of the published model at its usual shape, scaled to this one")
    if not sizes.traces:
        notes.append("the step was not traced: activations are not counted, weights and gradients are a lower bound")
    low = Trace.from_json(answers["smallest"]) if "smallest" in answers and basis in sizes.traces else None
    return sizes, Traced(counts, basis, low), notes


def _with_published(sizes: Sizes, facts: RunFacts, shape: Shape) -> Sizes:
    """With traces of a published model that were made before, scaled to this shape: a good guess, and marked as one."""
    weights = str(facts.options.get("pretrained_model_name_or_path") or "")
    known = published_traces(weights, facts.family, full=facts.full)
    if known is None or known.parameters != sizes.denoiser.parameters:
        return sizes  # another model of the same family
    batch = known.area / shape.area
    return replace(sizes, traces=known.traces, traced_batch=batch, guessed=True)


_BY_CHECKPOINTING = {"checkpointed": True, "plain": False}


def _components(facts: RunFacts, notes: list[str]) -> list[Component]:
    weights = str(facts.options.get("pretrained_model_name_or_path") or "")
    parts = list(read_components(weights, facts.family, os.environ).values())
    if any(part.source == "cited" for part in parts):
        notes.append(f"the model's files are not here: {next(p.note for p in parts if p.source == 'cited')}")
    return parts


def _count_questions(parts: Sequence[Component]) -> dict[str, dict[str, Any]]:
    """About parts whose configuration is here and whose weights are not. Asked with the rest: a child costs seconds."""
    return {
        f"size of {part.name}": traces.count_request(part.config)
        for part in parts
        if part.config and not part.parameters and part.kind != "denoiser"
    }


def _counted(part: Component, answers: Mapping[str, Any]) -> Component:
    found = answers.get(f"size of {part.name}")
    return part if found is None else replace(part, parameters=found["parameters"])


def _questions(facts: RunFacts, denoiser: Component, latent: Sequence[int], *, like: str) -> dict[str, dict[str, Any]]:
    """The step as configured first; the other way second, so that advice has a basis."""
    if not denoiser.config:
        return {}
    ways = sorted(_BY_CHECKPOINTING.items(), key=lambda item: item[1] != facts.checkpointing)
    return {
        name: traces.step_request(
            facts.options, denoiser.config, batch=facts.batch, latent=latent, checkpointing=checkpointing, like=like
        )
        for name, checkpointing in ways
    }


def _vae_questions(vae: Component | None, shape: Shape) -> dict[str, dict[str, Any]]:
    if vae is None or not vae.config or shape.frames:
        return {}
    channels = int(vae.config.get("in_channels") or 3)
    return {"vae": traces.vae_request(vae.config, (1, channels, shape.height, shape.width), "bf16")}


def _answers(questions: Mapping[str, dict[str, Any]], *, trace: bool, notes: list[str]) -> dict[str, Any]:
    if trace:
        found = traces.ask(list(questions.values()))
    else:
        found = [traces.remembered(question) or {} for question in questions.values()]
    answers = dict(zip(questions, found, strict=True))
    notes += [
        f"{name}: could not be traced: {answer['error']}" for name, answer in answers.items() if "error" in answer
    ]
    return {name: answer for name, answer in answers.items() if answer and "error" not in answer}


def _elements(latent: Sequence[int]) -> int:
    total = 1
    for length in latent:
        total *= length
    return total


def _latent_channels(vae: Component | None) -> int:
    config = vae.config if vae is not None and vae.config else {}
    return int(config.get("latent_channels") or config.get("z_dim") or 16)


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
