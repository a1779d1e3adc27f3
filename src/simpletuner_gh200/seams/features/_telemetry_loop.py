"""The two moments of the training loop that no seam gives: it turns, and a micro-batch is through.

Both are wrapped on the instances of this run only. Upstream looks for a stop signal at the top of every turn, right
before it fetches a batch, and runs each micro-batch inside ``accelerator.accumulate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from simpletuner_gh200.telemetry.clock import StepClock

TOP_OF_LOOP = "_exit_on_signal"


class LoopWatch:
    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._ours: list[tuple[Any, str, Any]] = []

    def watch(self, trainer: Any) -> None:
        self._put(trainer, TOP_OF_LOOP, self._top(getattr(trainer, TOP_OF_LOOP)))
        self._put(trainer.accelerator, "accumulate", self._micro_batch(trainer.accelerator.accumulate))
        self._clock.batch_asked()

    def leave(self) -> None:
        """Take our wrappers off, where they still are ours to take."""
        for owner, name, wrapper in self._ours:
            if vars(owner).get(name) is wrapper:
                delattr(owner, name)
        self._ours = []

    def _put(self, owner: Any, name: str, wrapper: Any) -> None:
        setattr(owner, name, wrapper)
        self._ours.append((owner, name, wrapper))

    def _top(self, original: Any) -> Any:
        def top(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            self._clock.batch_asked()
            return result

        return top

    def _micro_batch(self, original: Any) -> Any:
        @contextmanager
        def accumulate(*models: Any) -> Iterator[None]:
            with original(*models):
                yield
            self._clock.batch_done()

        return accumulate
