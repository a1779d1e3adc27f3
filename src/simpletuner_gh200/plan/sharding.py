"""What FSDP2 leaves on each rank, and what it gathers for a while. Pure.

``fully_shard`` cuts every parameter along its first dimension into as many pieces as there are ranks, and pads them to
the longest. accelerate keeps what is trained in fp32 there, whatever the precision of the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simpletuner_gh200.model.optimizer_table import optimizers
from simpletuner_gh200.plan.facts import ELEMENT, RunFacts
from simpletuner_gh200.plan.sizes import Step


def shard_bytes(rows: Mapping[int, int], ranks: int) -> int:
    """Of one rank. ``rows``: first dimension -> bytes of one row, of all parameters that have this dimension."""
    return sum(-(-length // ranks) * size for length, size in rows.items())


def is_sharded(facts: RunFacts) -> bool:
    return facts.sharded and facts.ranks > 1


def as_held(facts: RunFacts) -> RunFacts:
    """The facts of what stays: fp32 where it is trained, and shadows where the weights are."""
    if not is_sharded(facts) or not facts.full:
        return facts
    return replace(facts, weights="fp32", ema_on_device=facts.ema)


def shard(facts: RunFacts, step: Step) -> Step:
    """Of one rank: its share, and what is whole for a while.

    Whole are the parameters outside of blocks during a step, two blocks (the next is on its way while one is used), in
    training two blocks' gradients on their way to the others, and between the micro-batches of a window all gradients:
    accelerate has them added up before it scatters them.
    """
    if not is_sharded(facts):
        return step
    wide = ELEMENT[as_held(facts).weights] // facts.bytes_per_weight
    parameters = sum(length * size for length, size in step.rows.items())
    kept = shard_bytes(step.rows, facts.ranks) if parameters else -(-step.weights // facts.ranks)
    buffers = max(step.weights - parameters, 0) if parameters else 0
    ratio = kept / parameters if parameters else 1 / facts.ranks
    blocks = 2 * step.largest_block
    passing = step.outside + blocks + (blocks if facts.full else 0)
    waiting = step.gradients if facts.accumulation > 1 else 0
    return replace(
        step,
        weights=kept * wide + buffers,
        gradients=round(step.gradients * ratio) * wide + waiting,
        trained=round(step.trained * ratio),
        stepped=round(step.stepped * ratio),
        transient=step.transient + passing,
        forward=step.forward + step.outside + blocks,
        whole=step.weights * wide,
    )


STEPS_IN_FP32 = "torch-adamw"
"""Named where an optimizer that was asked for does not."""


def refuses_fp32(facts: RunFacts) -> bool:
    """Would its optimizer refuse to step, since shards of what is trained are in fp32?"""
    row = optimizers().get(facts.optimizer)
    return is_sharded(facts) and facts.full and facts.weights == "bf16" and row is not None and row.bytes_fp32 is None


def sharding_notes(facts: RunFacts) -> list[str]:
    """What is not a size, and ends or surprises a sharded run."""
    if not is_sharded(facts):
        return []
    found = []
    if refuses_fp32(facts):
        found.append(f"{facts.optimizer} takes no fp32 weights, and FSDP2 keeps them so: {STEPS_IN_FP32} steps there")
    if facts.accumulation > 1:
        found.append("within an accumulation window every rank holds all gradients, not its part of them")
    return found
