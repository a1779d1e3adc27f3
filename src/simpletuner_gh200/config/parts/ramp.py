"""``gh200_optimizations``: the batch ramp."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simpletuner_gh200.config.part import Part, PartModel


class RampSettings(PartModel):
    enable_batch_size_rampup: bool = Field(
        default=False, description="Grow the effective batch over the run by exact accumulation windows."
    )
    initial_effective_batch_size: int | None = Field(
        default=None, ge=1, description="Effective batch, over all ranks, of the first window."
    )
    target_effective_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Effective batch at the end of the ramp; unset: train_batch_size x world x "
        "gradient_accumulation_steps.",
    )
    batch_rampup_steps: int | None = Field(
        default=None, ge=1, description="Length of the ramp in micro-batches per rank."
    )
    ramp_curve: Literal["quadratic", "linear", "stepwise"] = Field(
        default="quadratic", description="Shape of the ramp."
    )
    ramp_increment: int | None = Field(
        default=None, ge=1, description="Effective batch added at each step of a stepwise ramp."
    )
    ramp_lr_rule: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="Tie the learning rate to the effective batch. Never on by itself."
    )


def _check(model: PartModel) -> list[tuple[str, str]]:
    assert isinstance(model, RampSettings)
    if not model.enable_batch_size_rampup:
        return []
    problems = []
    for key in ("initial_effective_batch_size", "batch_rampup_steps"):
        if getattr(model, key) is None:
            problems.append((key, "needed when enable_batch_size_rampup is true, and not set"))
    if model.ramp_curve == "stepwise" and model.ramp_increment is None:
        problems.append(("ramp_increment", "needed when ramp_curve is 'stepwise', and not set"))
    return problems


PART = Part(block="gh200_optimizations", feature="ramp", model=RampSettings, landed=True, check=_check)
