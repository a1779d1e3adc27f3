"""GH108, GH407 and GH408: SimpleTuner's own ways of keeping weights in host memory, and what they cost there."""

from __future__ import annotations

from simpletuner_gh200.config.allocator import PINNED_ADVICE, PINNED_KEY, split_options
from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.environment import ALLOCATOR, flag_from_text
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.diagnostics.check import Check, Finding, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context

RAMTORCH = ("ramtorch", "ramtorch_text_encoder", "ramtorch_vae", "ramtorch_controlnet")
SWAPPED = "musubi_blocks_to_swap"


def pinned_rounding(context: Context) -> Finding:
    torch = context.torch
    if torch is None or not torch.cuda:
        return skipped("no CUDA build of torch here")
    given = {key for name in ALLOCATOR for key, _value in split_options(context.environment.get(name, ""))}
    if PINNED_KEY in given:
        return passed(f"{PINNED_KEY} is set")
    pinning = _pinning(context.training) if context.training else []
    if not torch.knows(PINNED_KEY):
        return passed(f"torch {torch.version} has no {PINNED_KEY}: it rounds every pinned tensor up to a power of two")
    if not pinning:
        return passed(f"torch {torch.version} knows {PINNED_KEY}; worth setting with RamTorch or block swapping")
    return warned(
        f"{' and '.join(pinning)} pins weights, each rounded up to a power of two",
        f"export {ALLOCATOR[0]}={PINNED_ADVICE} (beside what it holds already)",
    )


def accumulation(context: Context) -> Finding:
    training = context.training
    if training is None:
        return skipped("no configuration was given")
    if not _on(training, RAMTORCH[0]):
        return skipped("no RamTorch in it")
    steps = _number(training, "gradient_accumulation_steps", 1)
    if training.settings is None:
        return skipped("its blocks have errors, so whether the ramp accumulates is not known")
    ramp = training.settings.part(RampSettings).enable_batch_size_rampup
    if steps <= 1 and not ramp:
        return passed("RamTorch without accumulation")
    how = "the batch ramp accumulates" if ramp else f"gradient_accumulation_steps is {steps}"
    return warned(
        f"RamTorch clears gradients at every micro-batch, and {how}: only the last one of a window would count",
        "set gradient_accumulation_steps to 1 and leave the ramp off, or go without ramtorch (use_uvm keeps optimizer "
        "state in Grace)",
    )


def copies_per_rank(context: Context) -> Finding:
    training = context.training
    if training is None:
        return skipped("no configuration was given")
    pinning = _pinning(training)
    if not pinning:
        return skipped("no RamTorch and no block swapping in it")
    ranks = training.job.ranks
    if ranks <= 1:
        return passed(f"{' and '.join(pinning)} with one rank")
    return warned(
        f"{' and '.join(pinning)} with {ranks} ranks: each pins a copy of the weights of its own",
        "count them against the node's memory (GH305), shard the model instead (FSDP), or use one rank",
    )


def _pinning(training: Training) -> list[str]:
    found = [name for name in RAMTORCH if _on(training, name)]
    return [*found, *([SWAPPED] if _number(training, SWAPPED, 0) > 0 else [])]


def _on(training: Training, name: str) -> bool:
    value = training.values.get(name, False)
    return flag_from_text(value) if isinstance(value, str) else bool(value)


def _number(training: Training, name: str, default: int) -> int:
    return int(str(training.values.get(name) or default))


CHECKS = (
    Check(
        code="GH108",
        what="rounding of pinned memory",
        why="torch rounds what it pins up to a power of two: weights kept in host memory can take half as much again.",
        run=pinned_rounding,
    ),
    Check(
        code="GH407",
        what="RamTorch and gradient accumulation",
        why="RamTorch hands gradients over and clears them at every micro-batch: a window's earlier ones are lost.",
        run=accumulation,
    ),
    Check(
        code="GH408",
        what="pinned weights of several ranks",
        why="RamTorch and block swapping keep pinned weights in every rank: a node with four GPUs holds four copies.",
        run=copies_per_rank,
    ),
)
