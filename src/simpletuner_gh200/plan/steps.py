"""What one micro-batch and its optimizer step take on one rank under given settings, whole or sharded. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from simpletuner_gh200.model.activations.policy import Block
from simpletuner_gh200.model.optimizer_table import OptimizerFacts, optimizers
from simpletuner_gh200.plan.facts import ELEMENT, RunFacts, Source
from simpletuner_gh200.plan.sizes import ModelSizes
from simpletuner_gh200.plan.traces import Trace

UNKNOWN_OPTIMIZER = 8.0
"""Bytes per trained parameter that are assumed of an optimizer nobody measured."""

_ASSUMED_BLOCKS = 20
"""Of a model that was not traced: few have fewer."""


@dataclass(frozen=True)
class StepSizes:
    """Bytes and operations of one micro-batch on one rank."""

    trained: int
    stepped: int
    """Trained parameters that an optimizer has state for."""
    weights: int
    gradients: int
    weights_source: Source
    source: Source
    """Of everything that needs a trace."""
    transient: int = 0
    """Beyond weights and gradients at the peak."""
    forward: int = 0
    """Beyond weights, and gradients of before, at the end of the forward pass."""
    saved: int = 0
    flops: float = 0.0
    blocks: tuple[Block, ...] = ()
    rows: Mapping[int, int] = field(default_factory=dict)
    """First dimension of parameters -> bytes of one row; empty where no trace tells."""
    largest_block: int = 0
    outside: int = 0
    """Bytes of weights in the largest block, and in none: what FSDP2 gathers at once."""
    whole: int = 0
    """Bytes of all weights where a rank holds a part of them."""


def one_step(facts: RunFacts, sizes: ModelSizes) -> StepSizes:
    """From the trace; without one, what is certain: weights, and for full training their gradients.

    Where activations go to Grace the run switches checkpointing off block by block, so the plain trace is its basis.
    """
    checkpointed = facts.checkpointing and (facts.activations == "off" or False not in sizes.traces)
    trace = sizes.traces.get(checkpointed)
    if trace is None:
        return _untraced(facts, sizes)
    whole, stacks = trace.whole, trace.stacks.values()
    scale = facts.batch / sizes.traced_batch
    forward, beyond = whole.forward * scale, (whole.peak - whole.gradients) * scale
    transient = forward if facts.gradients_outlive else forward - whole.gradients
    weights = whole.weights
    if facts.quantised is not None:
        weights = round((whole.parameters - whole.trained) * facts.quantised) + whole.trained_bytes
    return StepSizes(
        trained=whole.trained,
        stepped=whole.stepped or whole.trained,  # a trace that was published before this was counted has none
        weights=weights,
        gradients=whole.gradients,
        weights_source="computed",
        source="assumed" if sizes.guessed else "computed",
        transient=round(max(transient, beyond)),
        forward=round(forward),
        saved=round(whole.saved * scale),
        flops=whole.flops * scale,
        blocks=_blocks(trace, scale, passes=(3 if facts.full else 2) + checkpointed, recomputable=facts.checkpointing),
        rows=trace.all_rows,
        largest_block=max((stack.each.weights for stack in stacks), default=whole.weights),
        outside=max(whole.weights - sum(stack.count * stack.each.weights for stack in stacks), 0),
    )


def _blocks(trace: Trace, scale: float, *, passes: int, recomputable: bool) -> tuple[Block, ...]:
    """In the order of the forward pass; what belongs to no stack can neither be moved nor computed again.

    ``passes``: how many times a step computes as much as a forward pass: once forward, once for gradients of inputs,
    once for those of weights, once more where it is checkpointed. Only a block that SimpleTuner would checkpoint can be
    computed again.
    """
    each = (
        Block(
            saved=round(stack.each.saved * scale),
            work=stack.each.flops * scale / passes,
            inputs=round(stack.each.saved * scale / 50),
            recomputable=recomputable,
        )
        for stack in trace.stacks.values()
        for _ in range(stack.count)
    )
    return tuple(each)


def _untraced(facts: RunFacts, sizes: ModelSizes) -> StepSizes:
    count = sizes.denoiser.parameters
    weights = round(count * (facts.quantised if facts.quantised is not None else facts.bytes_per_weight))
    trained = count if facts.full else 0
    return StepSizes(
        trained=trained,
        stepped=trained,
        weights=weights,
        gradients=trained * facts.bytes_per_weight,
        weights_source=sizes.denoiser.source,
        source="assumed",
        largest_block=round(weights / _ASSUMED_BLOCKS),
    )


@dataclass(frozen=True)
class OptimizerState:
    """Bytes of all its state on one rank, and how the optimizer passes over them."""

    bytes: int
    source: Source
    optimizer: OptimizerFacts | None


def optimizer_state(facts: RunFacts, step: StepSizes) -> OptimizerState:
    """Of parameters with a gradient; one that makes its state before the first step has it for all that is trained."""
    known = optimizers().get(facts.optimizer)
    count = step.trained if known is not None and known.born == "init" else step.stepped
    each = known.bytes_per_parameter(facts.weights) if known is not None else None
    if each is None and known is not None:
        each = known.bytes_bf16  # SimpleTuner casts the weights to what this optimizer needs
    if each is None:
        return OptimizerState(round(UNKNOWN_OPTIMIZER * count), "assumed", known)
    return OptimizerState(round(each * count), "measured", known)


# -- FSDP2 -------------------------------------------------------------------------------------------------
# ``fully_shard`` cuts every parameter along its first dimension into as many pieces as there are ranks, and pads them
# to the longest. accelerate keeps what is trained in fp32 there, whatever the precision of the computation.

STEPS_IN_FP32 = "torch-adamw"
"""Named where the configured optimizer does not."""


def shard_bytes(rows: Mapping[int, int], ranks: int) -> int:
    """Of one rank. ``rows``: first dimension -> bytes of one row, of all parameters that have this dimension."""
    return sum(-(-length // ranks) * size for length, size in rows.items())


def as_held(facts: RunFacts) -> RunFacts:
    """The facts of what stays: fp32 where it is trained, and shadows where the weights are."""
    if not facts.is_sharded or not facts.full:
        return facts
    return replace(facts, weights="fp32", ema_on_device=facts.ema)


def shard(facts: RunFacts, step: StepSizes) -> StepSizes:
    """Of one rank: its share, and what is whole for a while.

    Whole are the parameters outside of blocks during a step, two blocks (the next is on its way while one is used), in
    training two blocks' gradients on their way to the others, and between the micro-batches of a window all gradients:
    accelerate has them added up before it scatters them.
    """
    if not facts.is_sharded:
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


def refuses_fp32(facts: RunFacts) -> bool:
    """Would its optimizer refuse to step, since shards of what is trained are in fp32?"""
    known = optimizers().get(facts.optimizer)
    in_fp32 = facts.is_sharded and facts.full and facts.weights == "bf16"
    return in_fp32 and known is not None and known.bytes_fp32 is None


def sharding_notes(facts: RunFacts) -> list[str]:
    """What is not a size, and ends or surprises a sharded run."""
    found = []
    if refuses_fp32(facts):
        found.append(f"{facts.optimizer} takes no fp32 weights, and FSDP2 keeps them so: {STEPS_IN_FP32} steps there")
    if facts.is_sharded and facts.accumulation > 1:
        found.append("within an accumulation window every rank holds all gradients, not its part of them")
    return found
