"""What is known about a run's model and data, and what one step of it takes under given settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simpletuner_gh200.model.activations.policy import Block
from simpletuner_gh200.model.optimizer_table import OptimizerFacts, optimizers
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.model_files import Component
from simpletuner_gh200.plan.rows import Source
from simpletuner_gh200.plan.shapes import Data
from simpletuner_gh200.plan.traces import Trace
from simpletuner_gh200.seams.trace.counted import Counted

UNKNOWN_OPTIMIZER = 8.0
"""Bytes per trained parameter that are assumed of an optimizer nobody measured."""

_ASSUMED_BLOCKS = 20
"""Of a model that was not traced: few have fewer."""


@dataclass(frozen=True)
class Sizes:
    """``traces``: by whether blocks are checkpointed, of ``traced_batch`` samples; empty where nothing was traced."""

    denoiser: Component
    data: Data
    encoders: tuple[Component, ...] = ()
    vae: Component | None = None
    vae_work: Mapping[str, int] = field(default_factory=dict)
    traces: Mapping[bool, Trace] = field(default_factory=dict)
    traced_batch: float = 1
    guessed: bool = False
    """Are the traces of another shape, and scaled?"""
    latent_bytes: int = 0
    embed_bytes: int = 0
    """Of one sample as it is cached."""


@dataclass(frozen=True)
class Step:
    """Bytes and operations of one micro-batch on one rank."""

    parameters: int
    trained: int
    stepped: int
    """Trained parameters that an optimizer has state for."""
    weights: int
    gradients: int
    transient: int
    """Beyond weights and gradients at the peak."""
    forward: int
    """Beyond weights, and gradients of before, at the end of the forward pass."""
    saved: int
    flops: float
    weights_source: Source
    source: Source
    """Of everything that needs a trace."""
    blocks: tuple[Block, ...] = ()
    rows: Mapping[int, int] = field(default_factory=dict)
    """First dimension of parameters -> bytes of one row; empty where no trace tells."""
    largest_block: int = 0
    outside: int = 0
    """Bytes of weights in the largest block, and in none: what FSDP2 gathers at once."""
    whole: int = 0
    """Bytes of all weights where a rank holds a part of them."""


def one_step(facts: RunFacts, sizes: Sizes) -> Step:
    """From the trace; without one, what is certain: weights, and for full training their gradients.

    Where activations go to Grace the run switches checkpointing off block by block, so the plain trace is its basis.
    """
    checkpointed = facts.checkpointing and (facts.activations == "off" or False not in sizes.traces)
    trace = sizes.traces.get(checkpointed)
    if trace is None:
        return _untraced(facts, sizes)
    whole = trace.whole
    scale = facts.batch / sizes.traced_batch
    forward, beyond = whole.forward * scale, (whole.peak - whole.gradients) * scale
    transient = forward if facts.gradients_outlive else forward - whole.gradients
    return Step(
        parameters=whole.parameters,
        trained=whole.trained,
        stepped=whole.stepped or whole.trained,  # a trace that was published before this was counted has none
        weights=_weights(facts, whole),
        gradients=whole.gradients,
        transient=round(max(transient, beyond)),
        forward=round(forward),
        saved=round(whole.saved * scale),
        flops=whole.flops * scale,
        weights_source="computed",
        source="assumed" if sizes.guessed else "computed",
        blocks=_blocks(trace, scale, passes=(3 if facts.full else 2) + checkpointed, recomputable=facts.checkpointing),
        rows=trace.all_rows,
        largest_block=max((stack.each.weights for stack in trace.stacks.values()), default=whole.weights),
        outside=max(whole.weights - sum(stack.count * stack.each.weights for stack in trace.stacks.values()), 0),
    )


def _weights(facts: RunFacts, whole: Counted) -> int:
    if facts.quantised is None:
        return whole.weights
    return round((whole.parameters - whole.trained) * facts.quantised) + whole.trained_bytes


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


def _untraced(facts: RunFacts, sizes: Sizes) -> Step:
    count = sizes.denoiser.parameters
    each = facts.quantised if facts.quantised is not None else facts.bytes_per_weight
    trained = count if facts.full else 0
    return Step(
        parameters=count,
        trained=trained,
        stepped=trained,
        weights=round(count * each),
        gradients=trained * facts.bytes_per_weight,
        transient=0,
        forward=0,
        saved=0,
        flops=0.0,
        weights_source=sizes.denoiser.source,
        source="assumed",
        largest_block=round(count * each / _ASSUMED_BLOCKS),
    )


@dataclass(frozen=True)
class StateFacts:
    """Of the optimizer: bytes of all its state on one rank, and how it passes over them."""

    bytes: int
    source: Source
    row: OptimizerFacts | None


def optimizer_state(facts: RunFacts, trained: int, stepped: int) -> StateFacts:
    """Of parameters with a gradient; one that makes its state before the first step has it for all that is trained."""
    row = optimizers().get(facts.optimizer)
    count = trained if row is not None and row.born == "init" else stepped
    each = row.bytes_per_parameter(facts.weights) if row is not None else None
    if each is None and row is not None:
        each = row.bytes_bf16  # SimpleTuner casts the weights to what this optimizer needs
    if each is None:
        return StateFacts(round(UNKNOWN_OPTIMIZER * count), "assumed", row)
    return StateFacts(round(each * count), "measured", row)
