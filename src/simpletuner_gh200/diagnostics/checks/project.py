"""GH4xx: the given training configuration, and what of SimpleTuner's pins memory."""

from __future__ import annotations

from simpletuner_gh200.config.training import Training
from simpletuner_gh200.diagnostics.check import CheckResult, check, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context, NothingToLookAt
from simpletuner_gh200.errors import ConfigError, UsageError
from simpletuner_gh200.plan.facts import read_facts, truth


@check("GH401", "configuration")
def configuration(context: Context) -> CheckResult:
    """What is wrong with it stops the run at its start; this is all that `gh200 train` checks there."""
    if context.config is None:
        raise NothingToLookAt("no configuration was given")
    try:
        notes = context.check_configuration(context.config)
    except ConfigError as bad:
        found = " | ".join(map(str, bad.problems))
        return failed(found, f"correct them; then: gh200 config check {context.config}")
    except UsageError as unknown:  # of the installation, which other checks look at
        return skipped(unknown.message)
    return passed("; ".join((f"{context.config}: nothing that would stop a run", *notes)))


# -- SimpleTuner's own ways of keeping weights in host memory ------------------------------------------------

PINNING = ("ramtorch", "ramtorch_text_encoder", "ramtorch_vae", "ramtorch_controlnet", "musubi_blocks_to_swap")


@check("GH407", "RamTorch and gradient accumulation")
def accumulation(context: Context) -> CheckResult:
    """RamTorch hands gradients over and clears them at every micro-batch: a window's earlier ones are lost."""
    if "ramtorch" not in _pinning(context.given):
        return skipped("no RamTorch in it")
    if context.given.settings is None:
        return skipped("its blocks have errors")
    facts = read_facts(context.given)
    if facts.accumulation <= 1 and not facts.ramped:
        return passed("RamTorch without accumulation")
    how = "the batch ramp accumulates" if facts.ramped else f"gradient_accumulation_steps is {facts.accumulation}"
    return warned(
        f"RamTorch clears gradients at every micro-batch, and {how}: only the last one of a window would count",
        "set gradient_accumulation_steps to 1 and leave the ramp off, or go without ramtorch (use_uvm keeps optimizer "
        "state in Grace)",
    )


@check("GH408", "pinned weights of several ranks")
def copies_per_rank(context: Context) -> CheckResult:
    """RamTorch and block swapping keep pinned weights in every rank: a node with four GPUs holds four copies."""
    pinning, ranks = " and ".join(_pinning(context.given)), context.given.job.ranks
    if not pinning:
        return skipped("no RamTorch and no block swapping in it")
    if ranks <= 1:
        return passed(f"{pinning} with one rank")
    fix = "count them against the node's memory (GH305), shard the model instead (FSDP), or use one rank"
    return warned(f"{pinning} with {ranks} ranks: each pins a copy of the weights of its own", fix)


def _pinning(training: Training) -> list[str]:
    return [name for name in PINNING if truth(training.values.get(name))]
