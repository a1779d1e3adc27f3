"""A run's schedule as facts for people and programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simpletuner_gh200.ramp.plan import notices
from simpletuner_gh200.ramp.schedule import GH200GradientRamp, Window


@dataclass(frozen=True)
class Report:
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
