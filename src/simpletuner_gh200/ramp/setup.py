"""From settings to a schedule, and what people are told about it, before a run and at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import ConfigError, Problem
from simpletuner_gh200.ramp.schedule import GH200GradientRamp, Window

TENTH = 10
"""One tenth of a run is its ramp where nobody says otherwise."""

UPSTREAM_BATCH = 4
"""SimpleTuner's train_batch_size where nobody sets it."""

NO_STEPS = Problem(
    "max_train_steps",
    "not set, and the batch ramp needs it: SimpleTuner would derive it from the epochs by one fixed accumulation, "
    "before the learning rate's schedule is made, and with windows of changing size both would be wrong",
    "set it; `gh200 ramp CONFIG` shows how many samples, and so how many epochs, it takes",
)


@dataclass(frozen=True)
class Sizes:
    """What a ramp is measured by, besides its own settings."""

    train_batch_size: int
    world_size: int = 1
    gradient_accumulation_steps: int = 1
    max_train_steps: int | None = None


@dataclass(frozen=True)
class Outlook:
    """What becomes of a ramp: said in the same words before a run, by the doctor, and by the ranks."""

    ramp: GH200GradientRamp
    problems: tuple[Problem, ...] = ()
    notices: tuple[str, ...] = ()


def outlook(settings: RampSettings, sizes: Sizes) -> Outlook:
    """The schedule that the settings, already checked, ask for; what stops it, and what a person should know."""
    ramp = ramp_from_settings(settings, sizes)
    flat = len(ramp.changes) == 1
    problems = () if flat or (sizes.max_train_steps or 0) > 0 else (NO_STEPS,)
    if flat and ramp.initial < ramp.target:
        return Outlook(ramp, problems, (_impossible(ramp, sizes.max_train_steps),))
    return Outlook(ramp, problems, tuple(notices(ramp)))


def ramp_from_settings(settings: RampSettings, sizes: Sizes) -> GH200GradientRamp:
    assert settings.initial_effective_batch_size is not None
    unit = sizes.train_batch_size * sizes.world_size
    target = settings.target_effective_batch_size or unit * sizes.gradient_accumulation_steps
    return GH200GradientRamp(
        initial=settings.initial_effective_batch_size,
        target=target,
        ramp_steps=settings.batch_rampup_steps or default_length(target, unit, sizes.max_train_steps),
        train_batch_size=sizes.train_batch_size,
        world_size=sizes.world_size,
        curve=settings.ramp_curve,
        increment=settings.ramp_increment,
    )


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
        return f"{name} {wanted} is no multiple of {unit}: rounded to {fitted}"
    return None


def _unit(ramp: GH200GradientRamp) -> str:
    return f"train_batch_size x ranks = {ramp.train_batch_size} x {ramp.world_size} = {ramp.unit}"


@dataclass(frozen=True)
class RampPreview:
    """The first ``steps`` windows of a ramp."""

    ramp: GH200GradientRamp
    steps: int
    told: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[Window, ...]:
        """The first window and every change within the run."""
        return tuple(window for window in self.ramp.changes if window.step < self.steps)

    @property
    def total_samples(self) -> int:
        return self.ramp.window(self.steps).samples

    @property
    def target_reached(self) -> int | None:
        """Optimizer steps done when windows first have the target's size; None if the run ends before."""
        last = self.ramp.changes[-1]
        return last.step if last.step < self.steps else None

    @property
    def notices(self) -> list[str]:
        told = list(self.told)
        if self.target_reached is None:
            told.append(f"the run ends after {self.steps} optimizer steps, before the ramp reaches its target")
        return told

    def to_json(self) -> dict[str, Any]:
        return {
            "initial": self.ramp.initial,
            "target": self.ramp.target,
            "curve": self.ramp.curve,
            "ramp_steps": self.ramp.ramp_steps,
            "train_batch_size": self.ramp.train_batch_size,
            "world": self.ramp.world_size,
            "optimizer_steps": self.steps,
            "total_samples": self.total_samples,
            "micro_batches_per_rank": self.total_samples // self.ramp.unit,
            "target_reached_at_step": self.target_reached,
            "changes": [self.change_row(window) for window in self.changes],
            "windows": [window.accumulation for window in self.ramp.windows(self.steps)],
            "notices": self.notices,
        }

    def change_row(self, window: Window) -> dict[str, int]:
        return {
            "step": window.step,
            "micro_batch": window.samples // self.ramp.unit,
            "samples": window.samples,
            "accumulation": window.accumulation,
            "effective": window.effective,
        }


# -- out of a configuration ----------------------------------------------------------------------------


def preview(training: Training, *, world: int | None = None) -> tuple[RampPreview, list[str]]:
    """The schedule of a configuration, and notes on how it was read. Raises ConfigError with every problem.

    Only the keys that matter are looked at: what may be wrong with the datasets is none of them.
    """
    if not training.values:
        training.raise_if_bad()
    notes = list(training.modern.notes)
    problems = list(training.block_problems)
    settings = _settings_with_ramp(training, notes, problems)
    sizes = {
        "train_batch_size": _whole(training.values, "train_batch_size", None, problems),
        "max_train_steps": _whole(training.values, "max_train_steps", None, problems),
        "gradient_accumulation_steps": _whole(training.values, "gradient_accumulation_steps", 1, problems),
        "num_processes": world if world is not None else _whole(training.values, "num_processes", 1, problems),
    }
    if settings is None or problems:
        raise ConfigError(tuple(dict.fromkeys(problems)), source=training.source)
    steps = sizes["max_train_steps"]
    found = outlook(
        settings, Sizes(sizes["train_batch_size"], sizes["num_processes"], sizes["gradient_accumulation_steps"], steps)
    )
    return RampPreview(found.ramp, steps, found.notices), notes


def outlook_of(training: Training) -> Outlook | None:
    """Of a configuration before its run; None where it asks for no ramp, or where its sizes can't be read."""
    settings = training.settings.part(RampSettings) if training.settings is not None else None
    if settings is None or not settings.enable_batch_size_rampup:
        return None
    unreadable: list[Problem] = []
    values = training.values
    steps = str(values.get("max_train_steps") or "0")
    sizes = Sizes(
        _whole(values, "train_batch_size", UPSTREAM_BATCH, unreadable),
        _whole(values, "num_processes", 1, unreadable),
        _whole(values, "gradient_accumulation_steps", 1, unreadable),
        int(steps) if steps.isdigit() else None,
    )
    return None if unreadable else outlook(settings, sizes)


def _settings_with_ramp(training: Training, notes: list[str], problems: list[Problem]) -> RampSettings | None:
    """The ramp's settings, switched on even where they are not: this is about what they would do."""
    blocks = dict(training.modern.blocks)
    block = blocks.get("gh200_optimizations") or {}
    if isinstance(block, Mapping) and not block.get("enable_batch_size_rampup"):
        if block:
            notes.append("enable_batch_size_rampup is not true: this is the schedule it would give")
        blocks["gh200_optimizations"] = {**block, "enable_batch_size_rampup": True}
    try:
        return resolve(blocks, {}, source=training.source).part(RampSettings)
    except ConfigError as bad:
        problems += bad.problems
        return None


def _whole(config: Mapping[str, Any], key: str, default: int | None, problems: list[Problem]) -> int:
    raw = config.get(key, default)
    try:
        value = int(str(raw))
    except ValueError:
        value = 0
    if value < 1:
        found = "not set" if raw is None else f"{raw!r} is not a whole number of at least 1"
        problems.append(Problem(key, found, "the schedule needs it"))
    return value
