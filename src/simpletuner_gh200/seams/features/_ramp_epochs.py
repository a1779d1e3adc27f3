"""Validation and evaluation by epoch: upstream places them by optimizer steps per epoch, which the ramp changes.

Measured by the target, an epoch would seem to be over long before its data are, while windows are smaller. Validation
is therefore left to the end of the data, which upstream reports by itself, and evaluation is placed by micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simpletuner_gh200.ramp.schedule import epoch_progress
from simpletuner_gh200.seams.features._ramp_wraps import Wraps


class Epochs:
    def __init__(self, trainer: Any, consumed: Callable[[], int]) -> None:
        self._trainer = trainer
        self._consumed = consumed
        self._wraps = Wraps()

    def install(self) -> None:
        validation = getattr(self._trainer, "validation", None)
        if hasattr(validation, "_epoch_relative_step"):
            self._wraps.put(validation, "_epoch_relative_step", lambda steps_per_epoch: None)
        evaluation = getattr(self._trainer, "evaluation", None)
        if hasattr(evaluation, "_epoch_progress"):
            self._wraps.put(evaluation, "_epoch_progress", self._progress)

    def uninstall(self) -> None:
        self._wraps.remove()

    def _progress(self, training_state: Mapping[str, Any], steps_per_epoch: float) -> float:
        return epoch_progress(int(training_state.get("current_epoch") or 1), self._consumed(), self._batches_in)

    def _batches_in(self, epoch: int) -> int:
        config = self._trainer.config
        schedule = getattr(config, "epoch_batches_schedule", None)
        if schedule:
            return sum(int(batches) for start, batches in schedule.items() if int(start) <= epoch)
        return int(getattr(config, "total_num_batches", 0) or 0)
