"""Measuring a run: where the time of an optimizer step goes, and what is slow to ask, asked by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("simpletuner_gh200")


@dataclass
class StepTimes:
    """Wall seconds of one optimizer step and what it consumed on this rank.

    ``saving`` went into checkpoints; ``other`` is what is none of these: logging, validation. On a GPU the kernels run
    behind the wall clock, so the split is where the training loop waited, not where the device worked.
    """

    seconds: float = 0.0
    data_wait: float = 0.0
    compute: float = 0.0
    saving: float = 0.0
    micro_batches: int = 0
    samples: int = 0

    @property
    def other(self) -> float:
        return max(0.0, self.seconds - self.data_wait - self.compute - self.saving)


class StepClock:
    """Told of the moments of the loop, in this order per micro-batch: requested, ready, done; then ``step_done``.

    Moments out of that order are harmless: a batch that was not requested is an evaluation's and doesn't count, and
    one that never came (the end of an epoch) counts as waiting.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._step_began = now()
        self._requested: float | None = None
        self._ready: float | None = None
        self._times = StepTimes()

    def batch_requested(self) -> None:
        """The loop turns: the next batch is fetched from now on."""
        now = self._now()
        if self._requested is not None:
            self._times.data_wait += now - self._requested
        self._requested = now

    def batch_ready(self, samples: int) -> None:
        if self._requested is not None:
            now = self._now()
            self._times.data_wait += now - self._requested
            self._times.samples += samples
            self._requested, self._ready = None, now

    def batch_done(self) -> None:
        """Forward, backward and, at the end of a window, the optimizer are through."""
        if self._ready is not None:
            self._times.compute += self._now() - self._ready
            self._times.micro_batches += 1
            self._ready = None

    def checkpoint_saved(self, seconds: float) -> None:
        """Between two micro-batches, or while one is computed: SimpleTuner saves in either place."""
        self._times.saving += seconds
        if self._ready is not None:
            self._ready += seconds
        if self._requested is not None:
            self._requested += seconds

    def step_done(self) -> StepTimes:
        """The window is complete; the next step begins now."""
        now, times = self._now(), self._times
        times.seconds = now - self._step_began
        self._step_began, self._times = now, StepTimes()
        return times


Source = Callable[[], Mapping[str, Any]]
"""Returns numbers by name; may raise, and is then asked no more."""

EVERY_SECONDS = 1.0


class Sampler:
    """``latest`` holds the newest answer of every source, by the source's name."""

    def __init__(self, sources: Mapping[str, Source], *, every: float = EVERY_SECONDS) -> None:
        self.latest: dict[str, Mapping[str, Any]] = {}
        self._sources = dict(sources)
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gh200-telemetry", daemon=True)

    def start(self) -> None:
        """Ask once right here, so that the first record has values, then go on in the background."""
        self.ask()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def ask(self) -> None:
        for name, source in list(self._sources.items()):
            try:
                self.latest[name] = source()
            except Exception as broken:  # noqa: BLE001 - a source must never reach training; said once, asked no more
                del self._sources[name]
                logger.warning("gh200: telemetry source %s is off: %s: %s", name, type(broken).__name__, broken)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.ask()
