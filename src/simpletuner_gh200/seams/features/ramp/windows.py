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
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.ramp.schedule import Window
from simpletuner_gh200.seams.patch import Patch, Patches, wrap_method

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


class ShownBatch:
    """Keeps ``batch=N`` in the postfix of SimpleTuner's training bar; quiet where there is no bar."""

    def __init__(self, trainer: Any, patches: Patches) -> None:
        self._trainer = trainer
        self._patches = patches
        self._effective: int | None = None

    def window_opened(self, window: Window) -> None:
        if self._effective is None and (bar := self._training_bar()) is not None:
            self._patches.install(wrap_method(bar, "set_postfix", self._set_postfix))
        self._effective = window.effective

    def _training_bar(self) -> Any | None:
        # The bar is a local of upstream's loop; tqdm itself keeps track of those that are open.
        kind = getattr(sys.modules.get(type(self._trainer).__module__), "tqdm", None)
        bars = [bar for bar in getattr(kind, "_instances", ()) if str(getattr(bar, "desc", "")).startswith("Epoch")]
        return bars[0] if len(bars) == 1 else None

    def _set_postfix(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **{**kwargs, "batch": self._effective})
