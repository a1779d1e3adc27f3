"""From settings to a schedule, and what people are told about it, before a run and at its start."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.errors import Problem
from simpletuner_gh200.ramp.schedule import GH200GradientRamp

TENTH = 10
"""One tenth of a run is its ramp where nobody says otherwise."""

NO_STEPS = Problem(
    "max_train_steps",
    "0, and so is num_train_epochs: nothing says how long the run is that the batch ramp is a part of",
    "set one of the two; `gh200 ramp CONFIG` shows how many samples, and so how many epochs, a number of steps takes",
)


@dataclass(frozen=True)
class Sizes:
    """What a ramp is measured by, besides its own settings."""

    train_batch_size: int
    world_size: int = 1
    gradient_accumulation_steps: int = 1
    max_train_steps: int | None = None
    num_train_epochs: float = 0
    """What the run's length is given by where no steps are."""
    micro_batches: int | None = None
    """Of those epochs, on one rank; known once the data are."""

    @property
    def by_epochs(self) -> bool:
        return not self.max_train_steps and self.num_train_epochs > 0


@dataclass(frozen=True)
class Outlook:
    """What becomes of a ramp: said in the same words before a run, by the doctor, and by the ranks."""

    ramp: GH200GradientRamp
    problems: tuple[Problem, ...] = ()
    notices: tuple[str, ...] = ()
    """What may not be meant."""
    remarks: tuple[str, ...] = ()


def outlook(settings: RampSettings, sizes: Sizes) -> Outlook:
    """The schedule that the settings, already checked, ask for; what stops it, and what a person should know."""
    ramp = ramp_from_settings(settings, sizes)
    flat = len(ramp.changes) == 1
    problems = () if flat or sizes.by_epochs or (sizes.max_train_steps or 0) > 0 else (NO_STEPS,)
    if flat and ramp.initial < ramp.target:
        return Outlook(ramp, problems, (_impossible(ramp, sizes.max_train_steps),))
    measured = (_by_epochs(sizes.num_train_epochs),) if sizes.by_epochs and not flat else ()
    return Outlook(ramp, problems, tuple(notices(ramp)), measured)


def _by_epochs(epochs: float) -> str:
    return (
        f"num_train_epochs {epochs:g} says how long the run is: once SimpleTuner has counted the data, it has as many "
        "optimizer steps as there are whole windows in them"
    )


def whole_windows(ramp: GH200GradientRamp, micro_batches: int) -> int:
    """Optimizer steps that so many micro-batches per rank are enough for; at least one.

    SimpleTuner stops at the end of the last epoch, whatever is in the window that is open then.
    """
    room = micro_batches * ramp.unit
    steps = range(ramp.origin.step, ramp.origin.step + micro_batches + 2)  # a window has at least one of them
    return max(bisect_right(steps, room, key=lambda step: ramp.window(step).samples) - 1 + ramp.origin.step, 1)


def ramp_from_settings(settings: RampSettings, sizes: Sizes) -> GH200GradientRamp:
    assert settings.initial_effective_batch_size is not None
    unit = sizes.train_batch_size * sizes.world_size
    target = settings.target_effective_batch_size or unit * sizes.gradient_accumulation_steps
    return GH200GradientRamp(
        initial=settings.initial_effective_batch_size,
        target=target,
        ramp_steps=settings.batch_rampup_steps or _default_length(target, unit, sizes),
        train_batch_size=sizes.train_batch_size,
        world_size=sizes.world_size,
        curve=settings.ramp_curve,
        increment=settings.ramp_increment,
    )


def _default_length(target: int, unit: int, sizes: Sizes) -> int:
    if sizes.micro_batches is not None:
        return max(1, sizes.micro_batches // TENTH)
    return default_length(target, unit, sizes.max_train_steps)


def default_length(target: int, unit: int, max_train_steps: int | None) -> int:
    """Micro-batches per rank: a tenth of those that the run takes at its target."""
    return max(1, (max_train_steps or 0) * max(1, round(Fraction(target, unit))) // TENTH)


def _impossible(ramp: GH200GradientRamp, max_train_steps: int | None) -> str:
    """The guides' quick configuration is like this: a large train_batch_size, and an initial batch below it."""
    told = (
        f"no ramp from {ramp.initial} to {ramp.target} is possible: a window has at least {_unit(ramp)} samples, so "
        f"the effective batch is {ramp.target_accumulation * ramp.unit} throughout"
    )
    batch = ramp.initial // ramp.world_size
    if not batch:
        return f"{told}; use fewer ranks, or a larger initial_effective_batch_size"
    length = default_length(ramp.target, batch * ramp.world_size, max_train_steps)
    settings = {"train_batch_size": batch, "target_effective_batch_size": ramp.target, "batch_rampup_steps": length}
    return f"{told}; this does what it means: " + ", ".join(f'"{key}": {value}' for key, value in settings.items())


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
    unit = _unit(ramp)
    if wanted < ramp.unit:
        return f"{name} {wanted} is below {unit}: the accumulation is 1 and the effective batch {ramp.unit}"
    fitted = round(Fraction(wanted, ramp.unit)) * ramp.unit
    if fitted != wanted:
        return f"{name} {wanted} is not a multiple of {unit}: rounded to {fitted}"
    return None


def _unit(ramp: GH200GradientRamp) -> str:
    return f"train_batch_size x ranks = {ramp.train_batch_size} x {ramp.world_size} = {ramp.unit}"
