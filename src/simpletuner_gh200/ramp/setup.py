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


def ramp_from_settings(
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


@dataclass(frozen=True)
class RampPreview:
    """The first ``steps`` windows of a ramp."""

    ramp: GH200GradientRamp
    steps: int

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
        told = notices(self.ramp)
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
    ramp = ramp_from_settings(
        settings,
        train_batch_size=sizes["train_batch_size"],
        world_size=sizes["num_processes"],
        gradient_accumulation_steps=sizes["gradient_accumulation_steps"],
    )
    return RampPreview(ramp, sizes["max_train_steps"]), notes


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
