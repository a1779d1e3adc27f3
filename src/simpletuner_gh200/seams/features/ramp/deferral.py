"""What upstream places by optimizer steps or epochs, placed right while windows change in size.

Nothing fires in mid-window: three things are not tied to optimizer steps upstream, a manual validation, which is
polled at every micro-batch, and the validation and the checkpoint at an epoch's end, which may fall anywhere in a
window. The requests themselves are left with upstream; only the moment at which it looks at them is moved.

Validation and evaluation by epoch are placed upstream by optimizer steps per epoch. Measured by the target, an epoch
would seem to be over long before its data are, while windows are smaller. Validation is therefore left to the end of
the data, which upstream reports by itself, and evaluation is placed by micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simpletuner_gh200.ramp.schedule import epoch_progress
from simpletuner_gh200.seams.patch import Patches, wrap_method

Predicate = Callable[[], bool]


class Deferral:
    """Wraps methods of one trainer, on the instance."""

    def __init__(self, trainer: Any, mid_window: Predicate) -> None:
        self._mid_window = mid_window
        self._checkpoint_due = False
        self._validation_due = False
        self._patches = Patches()
        self._trainer = trainer

    def install(self) -> None:
        trainer = self._trainer
        self._wrap(trainer, "_consume_manual_validation_request", self._manual_validation)
        self._wrap(trainer, "_should_checkpoint_epoch", self._epoch_checkpoint)
        self._wrap(trainer, "_consume_manual_checkpoint_request", self._manual_checkpoint)
        if getattr(trainer, "validation", None) is not None:
            self._wrap(trainer.validation, "should_perform_intermediary_validation", self._validation)

    def uninstall(self) -> None:
        self._patches.remove()

    def window_opened(self, _window: object) -> None:
        """What was due at the window before has had its chance."""
        self._validation_due = False

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            return around(wrapped, *args, **kwargs)

        if hasattr(owner, name):  # an older release may never do this
            self._patches.install(wrap_method(owner, name, call))

    def _manual_validation(self, original: Predicate) -> bool:
        # Not asking leaves the request where it is, so that it is found at the window's end.
        return not self._mid_window() and bool(original())

    def _epoch_checkpoint(self, original: Callable[[int], bool], epoch: int) -> bool:
        wanted = bool(original(epoch))
        if wanted and self._mid_window():
            self._checkpoint_due = True
            return False
        return wanted

    def _manual_checkpoint(self, original: Predicate) -> bool:
        # Upstream asks only after an optimizer step; both are asked, so that a request isn't left over.
        requested = bool(original())
        due, self._checkpoint_due = self._checkpoint_due, False
        return requested or due

    def _validation(self, original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        wanted = bool(original(*args, **kwargs))
        if self._mid_window():
            self._validation_due = self._validation_due or wanted
            return False
        return wanted or self._validation_due


class Epochs:
    """How far an epoch is, by the micro-batches it has consumed."""

    def __init__(self, trainer: Any, consumed: Callable[[], int]) -> None:
        self._trainer = trainer
        self._consumed = consumed
        self._patches = Patches()

    def install(self) -> None:
        validation = getattr(self._trainer, "validation", None)
        if hasattr(validation, "_epoch_relative_step"):
            self._patches.install(wrap_method(validation, "_epoch_relative_step", self._left_to_the_data))
        evaluation = getattr(self._trainer, "evaluation", None)
        if hasattr(evaluation, "_epoch_progress"):
            self._patches.install(wrap_method(evaluation, "_epoch_progress", self._progress))

    def uninstall(self) -> None:
        self._patches.remove()

    def _left_to_the_data(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        return None

    def _progress(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> float:
        def by_micro_batches(training_state: Mapping[str, Any], steps_per_epoch: float) -> float:
            return epoch_progress(int(training_state.get("current_epoch") or 1), self._consumed(), self._batches_in)

        return by_micro_batches(*args, **kwargs)

    def _batches_in(self, epoch: int) -> int:
        return batches_in(self._trainer.config, epoch)


def batches_in(config: Any, epoch: int) -> int:
    """Micro-batches of an epoch on this rank, by what upstream counted; datasets may join at a later one."""
    schedule = getattr(config, "epoch_batches_schedule", None)
    if schedule:
        return sum(int(batches) for start, batches in schedule.items() if int(start) <= epoch)
    return int(getattr(config, "total_num_batches", 0) or 0)


class EpochsToSteps:
    """A run that is given by its epochs: whenever upstream has counted the data, ``measured`` says what they hold.

    Upstream derives the steps by one fixed accumulation, twice: before the schedule of the learning rate is made, and
    when everything is prepared. Both times what it found is replaced, so that it and the schedule speak of one number.
    """

    def __init__(self, trainer: Any, measured: Callable[[int], int]) -> None:
        self._trainer = trainer
        self._measured = measured
        self._epochs = float(trainer.config.num_train_epochs)
        self._patches = Patches()

    def install(self) -> None:
        self._patches.install(wrap_method(self._trainer, "_recalculate_training_steps", self._recalculated))

    def uninstall(self) -> None:
        self._patches.remove()

    def micro_batches(self) -> int:
        """Of all epochs on this rank; a part of an epoch is that part of its micro-batches."""
        whole = int(self._epochs)
        total = sum(batches_in(self._trainer.config, epoch) for epoch in range(1, whole + 1))
        return total + int((self._epochs - whole) * batches_in(self._trainer.config, whole + 1))

    def _recalculated(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        instance.config.max_train_steps = self._measured(self.micro_batches())
        return result
