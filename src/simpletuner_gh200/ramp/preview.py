"""A configuration's ramp before its run: every change, and a picture for a terminal or a document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.draw.charts import Line, plot
from simpletuner_gh200.errors import ConfigError, Problem
from simpletuner_gh200.ramp.outlook import outlook, read_sizes, whole_windows
from simpletuner_gh200.ramp.schedule import GH200GradientRamp, Window
from simpletuner_gh200.units import counted

NEEDED_STEPS = (
    "the schedule needs it; where num_train_epochs says how long the run is, give --batches too: the micro-batches of "
    'an epoch on one rank, which SimpleTuner\'s log calls "Num batches"'
)


@dataclass(frozen=True)
class RampPreview:
    """The first ``steps`` windows of a ramp."""

    ramp: GH200GradientRamp
    steps: int
    remarks: tuple[str, ...] = ()

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
        if self.target_reached is not None:
            return list(self.remarks)
        return [*self.remarks, f"the run ends after {self.steps} optimizer steps, before the ramp reaches its target"]

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
    settings, wrong = _settings_with_ramp(training, notes)
    sizes, unreadable = read_sizes(training.values, world if world is not None else training.job.ranks)
    if sizes.by_epochs and batches:
        sizes = replace(sizes, micro_batches=round(sizes.num_train_epochs * batches))
    elif not sizes.max_train_steps:
        raw = training.values.get("max_train_steps")
        found = "not set" if raw is None else f"{raw!r} is not a whole number of at least 1"
        unreadable.append(Problem("max_train_steps", found, NEEDED_STEPS))
    problems = [*training.block_problems, *wrong, *unreadable]
    if settings is None or problems:
        raise ConfigError(tuple(dict.fromkeys(problems)), source=training.source)
    made = outlook(settings, sizes)
    steps = sizes.max_train_steps or whole_windows(made.ramp, sizes.micro_batches or 1)
    return RampPreview(made.ramp, steps, (*made.remarks, *made.notices)), notes


def _settings_with_ramp(training: Training, notes: list[str]) -> tuple[RampSettings | None, tuple[Problem, ...]]:
    """The ramp's settings, switched on even where they are not: this is about what they would do."""
    blocks = dict(training.modern.blocks)
    block = blocks.get("gh200_optimizations") or {}
    if isinstance(block, Mapping) and not block.get("enable_batch_size_rampup"):
        if block:
            notes.append("enable_batch_size_rampup is not true: this is the schedule it would give")
        blocks["gh200_optimizations"] = {**block, "enable_batch_size_rampup": True}
    try:
        return resolve(blocks, {}, source=training.source).part(RampSettings), ()
    except ConfigError as bad:
        return None, tuple(bad.problems)


# -- pictures --------------------------------------------------------------------------------------------------

EIGHTHS = " ▁▂▃▄▅▆▇█"


def in_characters(report: RampPreview, *, width: int = 60, height: int = 10) -> list[str]:
    """Lines of block characters with a scale at the left and the optimizer steps below."""
    top = max(window.effective for window in report.changes)
    columns = [report.ramp.window(column * report.steps // width).effective for column in range(width)]
    levels = [max(1, round(value * height * 8 / top)) for value in columns]
    margin = len(str(top))
    lines = []
    for row in range(height, 0, -1):
        label = str(top) if row == height else ""
        cells = "".join(EIGHTHS[min(8, max(0, level - (row - 1) * 8))] for level in levels)
        lines.append(f"{label:>{margin}} ┤{cells}".rstrip())
    lines.append(f"{0:>{margin}} ┼{'─' * width}")
    lines.append(f"{'':>{margin}}  0{report.steps:>{width - 1}}")
    return lines


def _title(report: RampPreview) -> str:
    first, last = report.changes[0].effective, report.changes[-1].effective
    samples, steps = counted(report.total_samples, "sample"), counted(report.steps, "optimizer step")
    return f"effective batch {first} to {last}, {report.ramp.curve}, {samples} in {steps}"


def as_svg(report: RampPreview) -> str:
    """A whole document that needs nothing but a viewer."""
    changes = [(window.step, window.effective) for window in report.changes]
    points = [*changes, (report.steps, changes[-1][1])]
    picture = plot([Line("effective batch", points, steps=True)], label=_title(report), unit=lambda value: f"{value:g}")
    assert picture is not None
    return picture.document()
