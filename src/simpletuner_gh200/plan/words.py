"""A plan in a few lines of words, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator

from simpletuner_gh200.plan.buckets import Bucket
from simpletuner_gh200.plan.nodes import OnNodes, fewest
from simpletuner_gh200.plan.planning import POOL_NAMES, Plan
from simpletuner_gh200.plan.rows import POOLS
from simpletuner_gh200.units import format_bytes, format_seconds

TOO_MUCH = "; TOO MUCH"
"""Ends the line of a pool that has not enough."""


def headline(plan: Plan) -> str:
    facts = plan.evaluated.facts
    kind = "full" if facts.full else "LoRA"
    fits = "fits" if plan.fits else "does not fit"
    return f"{facts.family} {kind}, {facts.optimizer}, batch {facts.batch}: {fits} on {plan.machine.title}"


def bucket_name(bucket: Bucket) -> str:
    shape = bucket.shape
    frames = f" x {shape.frames} frames" if shape.frames else ""
    return f"{shape.width} x {shape.height}{frames}"


def bucket_cells(bucket: Bucket) -> tuple[str, str, str, str, str, str]:
    """Name, samples, HBM, CPU memory, operations, where that is from."""
    sizes = (format_bytes(bucket.hbm), format_bytes(bucket.grace))
    samples = str(bucket.samples) if bucket.samples else "not counted"
    return bucket_name(bucket), samples, *sizes, f"{bucket.flops / 1e12:.3g} T", f"{bucket.source}: {bucket.note}"


BUCKET_HEADINGS = ("bucket", "samples", "HBM", "CPU memory", "operations", "source")


def summary(plan: Plan) -> Iterator[str]:
    """A line per pool: how full, in which phase, and by what most."""
    for pool in POOLS:
        used = plan.table.used(pool)
        if not used:
            continue
        phase = plan.table.worst_phase(pool)
        largest = plan.table.largest(phase, pool)
        capacity = plan.machine.capacity(pool)
        of = f" of {format_bytes(capacity)}" if capacity is not None else ""
        over = capacity is not None and used > capacity
        most = f"; most of it {largest.what}, {format_bytes(largest.bytes)}" if largest is not None else ""
        yield f"{POOL_NAMES[pool]}: {format_bytes(used)}{of} in {phase}{most}{TOO_MUCH if over else ''}"


def step_line(plan: Plan) -> str:
    bound = plan.evaluated.bounds
    others = ", ".join(
        f"{name} {format_seconds(value)}" for name, value in bound.seconds.items() if value and name != bound.binding
    )
    source = plan.machine.rate_sources["flops"]
    rate = f" at {plan.machine.flops / 1e12:.3g} TFLOP/s ({source})" if bound.binding == "compute" else ""
    least = f"a step takes at least {format_seconds(bound.step)}: {bound.binding} binds{rate}"
    return f"{least}; {others or 'nothing else counts'}"


def nodes_lines(plan: Plan) -> Iterator[str]:
    """Where the run is on several nodes, or would fit on more of them: each number of nodes, and what binds."""
    here = plan.evaluated.facts.ranks // max(plan.machine.sharing(plan.evaluated.facts.ranks), 1)
    enough = fewest(plan.nodes)
    if here == 1 and (plan.fits or enough is None):
        return
    for found in plan.nodes:
        yield f"{_on_nodes(found)}{' (this run)' if found.nodes == here and not found.needs else ''}"


def _on_nodes(found: OnNodes) -> str:
    bound, table = found.evaluated.bounds, found.evaluated.placed.table
    ranks = found.evaluated.facts.ranks
    needs = f", with {', '.join(f'{key}={value}' for key, value in found.needs.items())}" if found.needs else ""
    used = ", ".join(f"{POOL_NAMES[pool]} {format_bytes(table.used(pool))}" for pool in POOLS[:2] if table.used(pool))
    fits = "fits" if found.fits else "too much"
    nodes = f"{found.nodes} node{'s' * (found.nodes > 1)}, {ranks} rank{'s' * (ranks > 1)}"
    return f"{nodes}: {fits}, {used} a rank, a step at least {format_seconds(bound.step)} ({bound.binding}){needs}"
