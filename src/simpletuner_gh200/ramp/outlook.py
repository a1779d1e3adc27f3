"""From a configuration to its schedule, and what people are told about it: by preflight, doctor and ranks alike."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.training import Training
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
    max_train_steps: int = 0
    num_train_epochs: float = 0
    """What the run's length is given by where no steps are."""
    micro_batches: int | None = None
    """Of those epochs, on one rank; known once the data are."""

    @property
    def by_epochs(self) -> bool:
        return not self.max_train_steps and self.num_train_epochs > 0


def read_sizes(values: Mapping[str, Any], world: int) -> tuple[Sizes, list[Problem]]:
    """Of a training configuration; a size that can't be read is a problem, and 1 or 0 meanwhile."""
    problems: list[Problem] = []

    def whole(key: str, default: int | None = None) -> int:
        raw = values.get(key, default)
        if str(raw).strip().isdigit() and int(str(raw)) >= 1:
            return int(str(raw))
        found = "not set" if raw is None else f"{raw!r} is not a whole number of at least 1"
        problems.append(Problem(key, found, "the schedule needs it"))
        return 1

    batch, accumulation = whole("train_batch_size"), whole("gradient_accumulation_steps", 1)
    steps, epochs = (str(values.get(key) or "0").strip() for key in ("max_train_steps", "num_train_epochs"))
    try:
        run = float(epochs) if steps == "0" else 0.0
    except ValueError:
        run = 0.0
    return Sizes(batch, world, accumulation, int(steps) if steps.isdigit() else 0, max(0.0, run)), problems


@dataclass(frozen=True)
class Outlook:
    """What becomes of a ramp, in the same words for everybody."""

    ramp: GH200GradientRamp
    problems: tuple[Problem, ...] = ()
    notices: tuple[str, ...] = ()
    """What may not be meant."""
    remarks: tuple[str, ...] = ()


def outlook_of(training: Training) -> Outlook | None:
    """Of a configuration before its run; None where it asks for no ramp, or where its sizes can't be read."""
    settings = training.settings.part(RampSettings) if training.settings is not None else None
    if settings is None or not settings.enable_batch_size_rampup:
        return None
    sizes, unreadable = read_sizes(training.effective, training.job.ranks)
    return None if unreadable else outlook(settings, sizes)


def outlook(settings: RampSettings, sizes: Sizes) -> Outlook:
    """The schedule that the settings, already checked, ask for; what stops it, and what users should know."""
    ramp = ramp_from_settings(settings, sizes)
    flat = len(ramp.changes) == 1
    problems = () if flat or sizes.by_epochs or sizes.max_train_steps > 0 else (NO_STEPS,)
    if flat and ramp.initial < ramp.target:
        return Outlook(ramp, problems, (_impossible(ramp, sizes.max_train_steps),))
    by_epochs = (
        f"num_train_epochs {sizes.num_train_epochs:g} says how long the run is: once SimpleTuner has counted the data, "
        "it has as many optimizer steps as there are whole windows in them"
    )
    return Outlook(ramp, problems, tuple(notices(ramp)), (by_epochs,) if sizes.by_epochs and not flat else ())


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
    """Micro-batches per rank: a tenth of those of the run, or that it takes at its target."""
    at_target = sizes.max_train_steps * max(1, round(Fraction(target, unit)))
    return max(1, (at_target if sizes.micro_batches is None else sizes.micro_batches) // TENTH)


def whole_windows(ramp: GH200GradientRamp, micro_batches: int) -> int:
    """Optimizer steps that so many micro-batches per rank are enough for; at least one.

    SimpleTuner stops at the end of the last epoch, whatever is in the window that is open then.
    """
    room = micro_batches * ramp.unit
    steps = range(ramp.origin.step, ramp.origin.step + micro_batches + 2)  # a window has at least one of them
    return max(bisect_right(steps, room, key=lambda step: ramp.window(step).samples) - 1 + ramp.origin.step, 1)


# -- words -------------------------------------------------------------------------------------------------------


def _impossible(ramp: GH200GradientRamp, max_train_steps: int) -> str:
    """The guides' quick configuration is like this: a large train_batch_size, and an initial batch below it."""
    words = (
        f"no ramp from {ramp.initial} to {ramp.target} is possible: a window has at least {_unit(ramp)} samples, so "
        f"the effective batch is {ramp.target_accumulation * ramp.unit} throughout"
    )
    batch = ramp.initial // ramp.world_size
    if not batch:
        return f"{words}; use fewer ranks, or a larger initial_effective_batch_size"
    length = _default_length(ramp.target, batch * ramp.world_size, Sizes(batch, max_train_steps=max_train_steps))
    settings = {"train_batch_size": batch, "target_effective_batch_size": ramp.target}
    if length > 1:  # of a run whose length is given
        settings["batch_rampup_steps"] = length
    return f"{words}; this does what it means: " + ", ".join(f'"{key}": {value}' for key, value in settings.items())


def notices(ramp: GH200GradientRamp) -> Iterator[str]:
    """Where sizes are rounded or clamped to whole micro-batches, and which way the ramp goes."""
    sizes = {"initial_effective_batch_size": ramp.initial, "target_effective_batch_size": ramp.target}
    for name, wanted in sizes.items():
        fitted = round(Fraction(wanted, ramp.unit)) * ramp.unit
        if wanted < ramp.unit:
            yield f"{name} {wanted} is below {_unit(ramp)}: the accumulation is 1 and the effective batch {ramp.unit}"
        elif fitted != wanted:
            yield f"{name} {wanted} is not a multiple of {_unit(ramp)}: rounded to {fitted}"
    if ramp.initial > ramp.target:
        yield f"the effective batch shrinks over the run, from {ramp.initial} to {ramp.target}"
    elif ramp.initial == ramp.target:
        yield f"the initial and the target effective batch are both {ramp.target}: there is nothing to ramp"


def _unit(ramp: GH200GradientRamp) -> str:
    return f"train_batch_size x ranks = {ramp.train_batch_size} x {ramp.world_size} = {ramp.unit}"
