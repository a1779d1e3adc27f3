"""Where the time of an optimizer step goes: waiting for data, computing, and the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Wall seconds of one optimizer step and what it consumed on this rank.

    ``saving`` went into checkpoints; ``other`` is what is none of these: logging, validation. On a GPU the kernels run
    behind the wall clock, so the split is where the training loop waited, not where the device worked.
    """

    seconds: float
    data_wait: float
    compute: float
    saving: float
    micro_batches: int
    samples: int

    @property
    def other(self) -> float:
        return max(0.0, self.seconds - self.data_wait - self.compute - self.saving)


class StepClock:
    """Told of the moments of the loop, in this order per micro-batch: asked, ready, done; then ``step_done``.

    Moments out of that order are harmless: a batch that was not asked for is an evaluation's and doesn't count, and
    one that never came (the end of an epoch) counts as waiting.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._step_began = now()
        self._asked: float | None = None
        self._ready: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._waited = 0.0
        self._computed = 0.0
        self._saved = 0.0
        self._micro_batches = 0
        self._samples = 0

    def batch_asked(self) -> None:
        """The loop turns: the next batch is fetched from now on."""
        now = self._now()
        if self._asked is not None:
            self._waited += now - self._asked
        self._asked = now

    def batch_ready(self, samples: int) -> None:
        if self._asked is None:
            return
        now = self._now()
        self._waited += now - self._asked
        self._asked, self._ready = None, now
        self._samples += samples

    def batch_done(self) -> None:
        """Forward, backward and, at the end of a window, the optimizer are through."""
        if self._ready is None:
            return
        self._computed += self._now() - self._ready
        self._ready = None
        self._micro_batches += 1

    def checkpoint_saved(self, seconds: float) -> None:
        """Between two micro-batches, or while one is computed: SimpleTuner saves in either place."""
        self._saved += seconds
        if self._ready is not None:
            self._ready += seconds
        if self._asked is not None:
            self._asked += seconds

    def step_done(self) -> StepTimes:
        """The window is complete; the next step begins now."""
        now = self._now()
        times = StepTimes(
            now - self._step_began, self._waited, self._computed, self._saved, self._micro_batches, self._samples
        )
        self._step_began = now
        self._reset()
        return times
