"""GH4xx: the given training configuration."""

from __future__ import annotations

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


@check("GH407", "RamTorch and gradient accumulation")
def accumulation(context: Context) -> CheckResult:
    """RamTorch hands gradients over and clears them at every micro-batch: a window's earlier ones are lost."""
    if not truth(context.given.values.get("ramtorch")):
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
