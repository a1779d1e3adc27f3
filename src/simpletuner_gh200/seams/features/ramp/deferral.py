"""What upstream places by optimizer steps or epochs, placed right while windows change in size.

Nothing fires in mid-window: three things are not tied to optimizer steps upstream, a manual validation, which is
polled at every micro-batch, and the validation and the checkpoint at an epoch's end, which may fall anywhere in a
window. The requests themselves are left with upstream; only the moment at which it looks at them is moved.

Validation and evaluation by epoch are placed upstream by optimizer steps per epoch. Measured by the target, an epoch
would seem to be over long before its data are, while windows are smaller. Validation is therefore left to the end of
the data, which upstream reports by itself, and evaluation is placed by micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from simpletuner_gh200.ramp.schedule import epoch_progress
from simpletuner_gh200.seams.patch import Patch, wrap_method

Predicate = Callable[[], bool]


def around(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[Patch]:
    """``call`` gets the original and its arguments; nothing where a release has no such method."""
    if hasattr(owner, name):
        yield wrap_method(owner, name, lambda wrapped, _instance, args, kwargs: call(wrapped, *args, **kwargs))


class Deferral:
    """Around methods of one trainer. ``consumed``: micro-batches so far, on this rank."""

    def __init__(self, trainer: Any, mid_window: Predicate, consumed: Callable[[], int]) -> None:
        self._trainer = trainer
        self._mid_window = mid_window
        self._consumed = consumed
        self._checkpoint_due = False
        self._validation_due = False

    def patches(self) -> Iterator[Patch]:
        trainer, validation = self._trainer, getattr(self._trainer, "validation", None)
        yield from around(trainer, "_consume_manual_validation_request", self._manual_validation)
        yield from around(trainer, "_should_checkpoint_epoch", self._epoch_checkpoint)
        yield from around(trainer, "_consume_manual_checkpoint_request", self._manual_checkpoint)
        yield from around(validation, "should_perform_intermediary_validation", self._validation)
        yield from around(validation, "_epoch_relative_step", lambda *_arguments, **_more: None)  # left to the data
        yield from around(getattr(trainer, "evaluation", None), "_epoch_progress", self._epoch_progress)

    def window_opened(self, _window: object) -> None:
        """What was due at the window before has had its chance."""
        self._validation_due = False

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

    def _epoch_progress(
        self, _original: Callable[..., float], training_state: Mapping[str, Any], steps_per_epoch: float
    ) -> float:
        epoch = int(training_state.get("current_epoch") or 1)
        return epoch_progress(epoch, self._consumed(), lambda one: batches_in(self._trainer.config, one))


def batches_in(config: Any, epoch: int) -> int:
    """Micro-batches of an epoch on this rank, by what upstream counted; datasets may join at a later one."""
    schedule = getattr(config, "epoch_batches_schedule", None)
    if schedule:
        return sum(int(batches) for start, batches in schedule.items() if int(start) <= epoch)
    return int(getattr(config, "total_num_batches", 0) or 0)


def epochs_to_steps(trainer: Any, measured: Callable[[int], int]) -> Patch:
    """A run that is given by its epochs: whenever upstream has counted the data, ``measured`` says what they hold.

    Upstream derives the steps by one fixed accumulation, twice: before the schedule of the learning rate is made, and
    when everything is prepared. Both times what it found is replaced, so that it and the schedule speak of one number.
    """
    epochs = float(trainer.config.num_train_epochs)  # upstream rounds it up on the way

    def recalculated(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        whole = int(epochs)
        micro_batches = sum(batches_in(instance.config, epoch) for epoch in range(1, whole + 1))
        micro_batches += int((epochs - whole) * batches_in(instance.config, whole + 1))
        instance.config.max_train_steps = measured(micro_batches)
        return result

    return wrap_method(trainer, "_recalculate_training_steps", recalculated)
