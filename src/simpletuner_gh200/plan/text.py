"""A plan in words: a few lines for a terminal and a page, why a run can't be, and what to do where nothing is known."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.plan.changes import SettingChange, in_words
from simpletuner_gh200.plan.models import model_of
from simpletuner_gh200.plan.rows import POOLS, Pool
from simpletuner_gh200.plan.sizes import named
from simpletuner_gh200.plan.variants import Bucket, OnNodes, fewest
from simpletuner_gh200.units import counted, format_bytes, format_seconds
from simpletuner_gh200.upstream.flavours import families, flavours_of

if TYPE_CHECKING:
    from simpletuner_gh200.plan.planning import Plan

POOL_NAMES: Mapping[str, str] = {"hbm": "HBM", "grace": "CPU memory", "disk": "the disk"}

BUCKET_HEADINGS = ("bucket", "samples", "HBM", "CPU memory", "operations", "source")

_TOO_MUCH = "; TOO MUCH"
"""Ends the line of a pool that has not enough."""

_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")
"""What can be downloaded by its name: owner and model, and no path."""


def headline(plan: Plan) -> str:
    facts = plan.evaluated.facts
    kind = "full" if facts.full else "LoRA"
    fits = "fits" if plan.fits else "does not fit"
    return f"{facts.family} {kind}, {facts.optimizer}, batch {facts.batch}: {fits} on {plan.machine.title}"


def whole_line(plan: Plan) -> Iterator[str]:
    """How long the run is, and how much of the data it sees."""
    if (whole := plan.whole) is None:
        return
    seen = f", {whole.passes:.3g} passes over the data" if whole.passes is not None else ""
    of = f"{counted(whole.steps, 'step')}, {counted(whole.samples, 'sample')}{seen}"
    first, training = sum(plan.start.values()), format_seconds(whole.seconds)
    before = f", {format_seconds(first)} before its first step" if first else ""
    least = f"in all at least {format_seconds(first + whole.seconds)}: {training} of training{before}"
    untraced = "" if plan.sizes.traces else "; computing is not in it, since the step was not traced"
    yield f"{least}; {of}; validation and saving come on top{untraced}"


def decision_line(plan: Plan) -> Iterator[str]:
    """What ``memory: "auto"`` does; on a single pool what helps there instead, the cheapest first."""
    if plan.decision is None:
        return
    settings = in_words(plan.decision.settings) or "nothing is moved"
    helps = [change.text() for change in plan.changes if change.fits] if plan.machine.one_pool and not plan.fits else ()
    yield f"memory auto: {plan.decision.why}: {settings}" + "; what helps: " * bool(helps) + ", or ".join(helps)


def order_of_changes(plan: Plan) -> str:
    """What the list of changes is sorted by, before it."""
    first = "those that change no number of the run first, then the least time a step"
    return f"what would be faster, {first}:" if plan.fits else f"what would help, what fits first; of these {first}:"


def summary(plan: Plan) -> Iterator[str]:
    """A line per pool: how full, in which phase, and by what most."""
    for pool in POOLS:
        used, capacity = plan.evaluated.used(pool), plan.machine.capacity(pool)
        of = f" of {format_bytes(capacity)}" if capacity is not None else ""
        if pool == "disk" and plan.free_disk is not None:
            of = f" of {format_bytes(plan.free_disk)} free" + ("" if capacity is not None else " here")
        over = _TOO_MUCH if capacity is not None and used > capacity else ""
        if not over and pool == "disk" and used > (plan.free_disk or used):
            over = "; more than is free here"
        if used:
            yield f"{POOL_NAMES[pool]}: {format_bytes(used)}{of} in {_phase_and_most(plan, pool)}{over}"


def _phase_and_most(plan: Plan, pool: Pool) -> str:
    phase = plan.evaluated.worst_phase(pool)
    largest = max(plan.evaluated.of(phase, pool), key=lambda row: row.bytes, default=None)
    return phase + (f"; most of it {largest.what}, {format_bytes(largest.bytes)}" if largest is not None else "")


def step_line(plan: Plan) -> str:
    bound = plan.evaluated
    others = ", ".join(
        f"{name} {format_seconds(value)}" for name, value in bound.seconds.items() if value and name != bound.binding
    )
    source = plan.machine.rate_sources["flops"]
    rate = f" at {plan.machine.flops / 1e12:.3g} TFLOP/s ({source})" if bound.binding == "compute" else ""
    least = f"a step takes at least {format_seconds(bound.least)}: {bound.binding} binds{rate}"
    return f"{least}; {others or 'nothing else counts'}"


def start_line(plan: Plan) -> Iterator[str]:
    if not any(plan.start.values()):
        return
    parts = ", ".join(f"{name} {format_seconds(value)}" for name, value in plan.start.items())
    yield f"with empty caches, before the first step: {parts}"


def bucket_name(bucket: Bucket) -> str:
    shape = bucket.shape
    return f"{shape.width} x {shape.height}" + (f" x {shape.frames} frames" if shape.frames else "")


def bucket_cells(bucket: Bucket) -> tuple[str, str, str, str, str, str]:
    """By ``BUCKET_HEADINGS``."""
    sizes = (format_bytes(bucket.hbm), format_bytes(bucket.grace))
    samples = str(bucket.samples) if bucket.samples else "not counted"
    return bucket_name(bucket), samples, *sizes, f"{bucket.flops / 1e12:.3g} T", f"{bucket.source}: {bucket.note}"


def nodes_lines(plan: Plan) -> Iterator[str]:
    """Where the run is on several nodes, or would fit on more of them: each number of nodes, and what binds."""
    ranks = plan.evaluated.facts.ranks
    here = ranks // plan.machine.sharing(ranks)
    if here == 1 and (plan.fits or fewest(plan.nodes) is None):
        return
    for found in plan.nodes:
        yield f"{_on_nodes(found)}{' (this run)' if found.nodes == here and not found.needs else ''}"


def _on_nodes(found: OnNodes) -> str:
    run, ranks = found.evaluated, found.evaluated.facts.ranks
    needs = f", with {in_words(found.needs)}" if found.needs else ""
    used = ", ".join(f"{POOL_NAMES[pool]} {format_bytes(run.used(pool))}" for pool in POOLS[:2] if run.used(pool))
    fits = "fits" if found.fits else "too much"
    nodes = f"{found.nodes} node{'s' * (found.nodes > 1)}, {ranks} rank{'s' * (ranks > 1)}"
    return f"{nodes}: {fits}, {used} a rank, a step at least {format_seconds(run.least)} ({run.binding}){needs}"


def refusal(plan: Plan) -> str | None:
    """Why a run can't be; None where only an assumption stands against it, or nothing does.

    A disk that is too small is no reason: it can be emptied while the run goes on.
    """
    reasons = []
    for pool, size in plan.evaluated.overflow(certain=True).items():
        if pool == "disk":
            continue
        capacity = format_bytes(plan.machine.capacity(pool) or 0)
        used = format_bytes(plan.evaluated.used(pool, certain=True))
        needs = f"at least {used} are needed in {_phase_and_most(plan, pool)}"
        reasons.append(f"{POOL_NAMES[pool]} has {capacity}, {needs}: {format_bytes(size)} too much")
    return "; ".join(reasons) or None


def too_much(plan: Plan, change: SettingChange | None) -> str:
    """Of a run that does not fit, to somebody who is choosing settings; ``change``: what would make it fit."""
    over = "; ".join(line.removesuffix(_TOO_MUCH) for line in summary(plan) if line.endswith(_TOO_MUCH))
    remedy = f"{change.text()} would fit" if change else "a smaller batch or resolution, or more GPUs, may"
    return f"{over}; {remedy}"


def unknown_model(plan: Plan) -> UsageError | None:
    """Why a plan says nothing, where its model has no size: whether it fits is then not known."""
    facts = plan.evaluated.facts
    if plan.sizes.denoiser.parameters or plan.sizes.traces:
        return None
    known = families()
    if known and facts.family.lower() not in known:
        close = difflib.get_close_matches(facts.family.lower(), known, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted(known))}"
        return UsageError(f"model_family {facts.family!r}: SimpleTuner has no such family", remedy=remedy)
    why = next((f": {note}" for note in plan.notes if "could not be traced" in note), "")
    remedy = _where_sizes_are(plan, traced_in_vain=bool(why))
    return UsageError(f"nothing is known of the size of {named(facts)}{why}", remedy=remedy)


def _where_sizes_are(plan: Plan, *, traced_in_vain: bool) -> str:
    facts = plan.evaluated.facts
    weights = model_of(facts.options)
    here, download = os.path.isdir(weights), bool(_REPOSITORY.fullmatch(weights))
    if plan.sizes.denoiser.config:
        if not traced_in_vain:
            return "plan without --no-trace: its configuration is here, and a trace counts it"
        return "its safetensors files tell too" + (f": hf download {weights}" if download and not here else "")
    if here:
        return f"{weights} has no transformer or unet with a config.json: copy it there, or name another folder"
    if download:
        return f"its configuration is enough: hf download {weights} --include '*.json'; or name a folder that has it"
    if not weights and (known := flavours_of(facts.family).flavours):
        return f"set model_flavour, one of {', '.join(known)}; or pretrained_model_name_or_path"
    return "set pretrained_model_name_or_path to a repository, or to a folder that has its configuration"
