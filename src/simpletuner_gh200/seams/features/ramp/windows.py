"""Windows in a running SimpleTuner: the accelerator and the configuration follow the schedule.

Upstream reads ``config.gradient_accumulation_steps`` for three different questions, and one number can't answer all
of them while the accumulation changes:

* inside the ``accumulate`` block it divides the loss by it: this is the size of the window at hand;
* outside, ``step % gradient_accumulation_steps == 0`` asks whether a window was just completed, before validation
  and uploads. ``step`` counts micro-batches from the resumed optimizer step on and ticks once more at each epoch's
  end, so that the remainder says nothing once windows differ in size;
* outside, epochs and buckets are measured by it: this is the target.

So the attribute is the window's size while the block runs, and ``between`` otherwise: the target as a number, except
that a remainder by it is 0 exactly when the last window is complete.

Nothing fires in mid-window: three things are not tied to optimizer steps upstream, a manual validation, which is
polled at every micro-batch, and the validation and the checkpoint at an epoch's end, which may fall anywhere in a
window. The requests themselves are left with upstream; only the moment at which it looks at them is moved.

Validation and evaluation by epoch are placed upstream by optimizer steps per epoch. Measured by the target, an epoch
would seem to be over long before its data are, while windows are smaller. Validation is therefore left to the end of
the data, which upstream reports by itself, and evaluation is placed by micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.ramp.schedule import Window, epoch_progress
from simpletuner_gh200.seams.patch import Patch, wrap_method

logger = logging.getLogger("simpletuner_gh200")


def between(target: int, accelerator: Any) -> int:
    """The target accumulation; ``step % it`` is the position in an open window, and 0 when none is open.

    A number that lies about one operator, and the only one in the package. It is fenced in: the contract has a fact
    that the loop uses this attribute as the right operand of ``/`` and ``%`` and in no other way, it stands there
    only between two micro-batches of a run with a ramp, and it turns into a plain int when it is copied or written
    down. The accelerator is in the closure, not in the number: SimpleTuner 3 writes the configuration down with
    everything that can be reached from it, and 4 copies it.
    """

    class Between(int):
        __slots__ = ()

        def __rmod__(self, step: Any) -> int:
            return 0 if accelerator.sync_gradients else int(accelerator.step)

        def __reduce__(self) -> tuple[type[int], tuple[int]]:
            return int, (int(self),)

    return Between(target)


class Windows:
    """Wraps ``accelerator.accumulate`` on the instance; ``next_window`` is asked whenever a window opens."""

    def __init__(self, accelerator: Any, config: Any, target: int, next_window: Callable[[], Window]) -> None:
        self._accelerator = accelerator
        self._config = config
        self._target = target
        self._next_window = next_window
        self._between = between(target, accelerator)
        self.current: Window | None = None
        """The window that is open, or that was completed last."""
        self.on_open: list[Callable[[Window], None]] = []

    @property
    def mid_window(self) -> bool:
        """Are there micro-batches that no optimizer step has used yet?"""
        return not self._accelerator.sync_gradients

    def patch(self) -> Patch:
        # A loader that accelerate prepared would close a window early, at less than its weight.
        self._accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
        return wrap_method(self._accelerator, "accumulate", self._accumulate)

    def let_go(self) -> None:
        self._config.gradient_accumulation_steps = self._target

    def _accumulate(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        return self._in_window(wrapped(*args, **kwargs))

    @contextmanager
    def _in_window(self, accumulate: AbstractContextManager[None]) -> Iterator[None]:
        if self.current is None or not self.mid_window:
            self._open(self._next_window())
        assert self.current is not None
        self._config.gradient_accumulation_steps = self.current.accumulation
        try:
            with accumulate:
                yield
        finally:
            self._config.gradient_accumulation_steps = self._between

    def _open(self, window: Window) -> None:
        accelerator = self._accelerator
        if accelerator.gradient_accumulation_steps != window.accumulation:
            accelerator.gradient_accumulation_steps = window.accumulation
            logger.debug("GH200 ramp adjusted gradient_accumulation_steps -> %d", window.accumulation)
        # accelerate syncs when its own count is a multiple of the accumulation: count this window from zero.
        accelerator.step = 0
        self.current = window
        for notify in self.on_open:
            notify(window)


def rate_patches(factor: Callable[[], float], *optimizers: Any) -> Iterator[Patch]:
    """The learning rate tied to the batch: every group's rate times ``factor()``, while the optimizer steps.

    Schedulers never see the changed rate: some compute the next rate from the present one.
    """

    def step(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        groups, times = optimizer.param_groups, factor()
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * times
        try:
            return wrapped(*args, **kwargs)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    for optimizer in (each for each in optimizers if each is not None):
        if any("lr" not in group for group in optimizer.param_groups):
            raise FeatureUnavailable(
                f"ramp_lr_rule: {type(optimizer).__name__} has parameter groups without a learning rate",
                remedy='set "ramp_lr_rule": "none", or use another optimizer',
            )
        yield wrap_method(optimizer, "step", step)


# -- what upstream places by steps and epochs ---------------------------------------------------------------

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
