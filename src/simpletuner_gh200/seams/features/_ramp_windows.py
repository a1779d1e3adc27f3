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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simpletuner_gh200.ramp.schedule import Window
from simpletuner_gh200.seams.features._ramp_wraps import Wraps

logger = logging.getLogger("simpletuner_gh200")


def between(target: int, accelerator: Any) -> int:
    """The target accumulation; ``step % it`` is the position in an open window, and 0 when none is open.

    The accelerator is in the closure, not in the number: SimpleTuner 3 writes the configuration down with everything
    that can be reached from it, and 4 copies it.
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
        self._original: Any = None
        self._wraps = Wraps()
        self.current: Window | None = None
        """The window that is open, or that was completed last."""
        self.on_open: list[Callable[[Window], None]] = []

    @property
    def mid_window(self) -> bool:
        """Are there micro-batches that no optimizer step has used yet?"""
        return not self._accelerator.sync_gradients

    def install(self) -> None:
        # A loader that accelerate prepared would close a window early, at less than its weight.
        self._accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
        self._original = self._accelerator.accumulate
        self._wraps.put(self._accelerator, "accumulate", self.accumulate)

    def uninstall(self) -> None:
        self._wraps.remove()
        self._config.gradient_accumulation_steps = self._target

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        if not self._wraps.active:  # the run is over, and someone who wrapped us still calls
            with self._original(*models):
                yield
            return
        if self.current is None or not self.mid_window:
            self._open(self._next_window())
        assert self.current is not None
        self._config.gradient_accumulation_steps = self.current.accumulation
        try:
            with self._original(*models):
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
