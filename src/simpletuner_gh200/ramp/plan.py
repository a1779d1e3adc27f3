"""From settings to a schedule, and what a person should be told about it."""

from __future__ import annotations

from fractions import Fraction

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.ramp.schedule import GH200GradientRamp


def plan(
    settings: RampSettings, *, train_batch_size: int, world_size: int, gradient_accumulation_steps: int
) -> GH200GradientRamp:
    """The schedule that the settings, already checked, ask for on so many ranks."""
    assert settings.initial_effective_batch_size is not None
    assert settings.batch_rampup_steps is not None
    target = settings.target_effective_batch_size
    return GH200GradientRamp(
        initial=settings.initial_effective_batch_size,
        target=target if target is not None else train_batch_size * world_size * gradient_accumulation_steps,
        ramp_steps=settings.batch_rampup_steps,
        train_batch_size=train_batch_size,
        world_size=world_size,
        curve=settings.ramp_curve,
        increment=settings.ramp_increment,
    )


def notices(ramp: GH200GradientRamp) -> list[str]:
    """Where sizes are rounded or clamped to whole micro-batches, and which way the ramp goes."""
    told = [
        _fitted("initial_effective_batch_size", ramp.initial, ramp),
        _fitted("target_effective_batch_size", ramp.target, ramp),
    ]
    if ramp.initial > ramp.target:
        told.append(f"the effective batch shrinks over the run, from {ramp.initial} to {ramp.target}")
    elif ramp.initial == ramp.target:
        told.append(f"the initial and the target effective batch are both {ramp.target}: there is nothing to ramp")
    return [notice for notice in told if notice is not None]


def _fitted(name: str, wanted: int, ramp: GH200GradientRamp) -> str | None:
    unit = f"train_batch_size x ranks = {ramp.train_batch_size} x {ramp.world_size} = {ramp.unit}"
    if wanted < ramp.unit:
        return f"{name} {wanted} is below {unit}: the accumulation is 1 and the effective batch {ramp.unit}"
    fitted = round(Fraction(wanted, ramp.unit)) * ramp.unit
    if fitted != wanted:
        return f"{name} {wanted} is no multiple of {unit}: rounded to {fitted}"
    return None
