"""A configuration's ramp before its run: what it would do, and what a person should know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import ConfigError, Problem
from simpletuner_gh200.ramp.schedule import GH200GradientRamp, Window
from simpletuner_gh200.ramp.setup import Outlook, Sizes, outlook, whole_windows


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


def preview(
    training: Training, *, world: int | None = None, batches: int | None = None
) -> tuple[RampPreview, list[str]]:
    """The schedule of a configuration, and notes on how it was read. Raises ConfigError with every problem.

    Only the keys that matter are looked at: what may be wrong with the datasets is none of them. ``batches``: of an
    epoch on one rank, for a run that is given by its epochs.
    """
    if not training.values:
        training.raise_if_bad()
    notes = list(training.modern.notes)
    problems = list(training.block_problems)
    settings = _settings_with_ramp(training, notes, problems)
    values = training.values
    epochs = epochs_of(training.effective)
    batch = _whole(values, "train_batch_size", None, problems)
    steps = 0 if epochs and batches else _whole(values, "max_train_steps", None, problems, NEEDED_STEPS)
    sizes = Sizes(
        batch,
        world if world is not None else training.job.ranks,
        _whole(values, "gradient_accumulation_steps", 1, problems),
        steps,
        epochs,
        round(epochs * batches) if epochs and batches else None,
    )
    if settings is None or problems:
        raise ConfigError(tuple(dict.fromkeys(problems)), source=training.source)
    found = outlook(settings, sizes)
    steps = steps or whole_windows(found.ramp, sizes.micro_batches or 1)
    return RampPreview(found.ramp, steps, (*found.remarks, *found.notices)), notes


NEEDED_STEPS = (
    "the schedule needs it; where num_train_epochs says how long the run is, give --batches too: the micro-batches of "
    'an epoch on one rank, which SimpleTuner\'s log calls "Num batches"'
)


def epochs_of(values: Mapping[str, Any]) -> float:
    """That a run is given by; 0 where its steps are, or where nothing readable is there."""
    if str(values.get("max_train_steps") or "0").strip() not in ("0", ""):
        return 0.0
    try:
        return max(0.0, float(str(values.get("num_train_epochs") or 0)))
    except ValueError:
        return 0.0


def outlook_of(training: Training) -> Outlook | None:
    """Of a configuration before its run; None where it asks for no ramp, or where its sizes can't be read."""
    settings = training.settings.part(RampSettings) if training.settings is not None else None
    if settings is None or not settings.enable_batch_size_rampup:
        return None
    unreadable: list[Problem] = []
    values = training.effective
    steps = str(values.get("max_train_steps") or "0")
    sizes = Sizes(
        _whole(values, "train_batch_size", None, unreadable),
        training.job.ranks,
        _whole(values, "gradient_accumulation_steps", 1, unreadable),
        int(steps) if steps.isdigit() else None,
        epochs_of(values),
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


def _whole(
    config: Mapping[str, Any],
    key: str,
    default: int | None,
    problems: list[Problem],
    remedy: str = "the schedule needs it",
) -> int:
    raw = config.get(key, default)
    try:
        value = int(str(raw))
    except ValueError:
        value = 0
    if value < 1:
        found = "not set" if raw is None else f"{raw!r} is not a whole number of at least 1"
        problems.append(Problem(key, found, remedy))
    return value
