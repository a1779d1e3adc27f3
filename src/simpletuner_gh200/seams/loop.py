"""The loop of one run: its turns, its micro-batches, its checkpoints, and what is written when the last step is done.

No seam gives these moments, so SimpleTuner's methods and accelerate's ``accumulate`` are wrapped on the objects of this
run. Upstream looks for a stop signal at the top of every turn, right before it fetches a batch, and runs each
micro-batch inside ``accumulate``, whose last leaving is the end of training itself. Where SimpleTuner has no method
that writes a checkpoint, saving counts as training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from simpletuner_gh200.seams.patch import Patches, wrap_method
from simpletuner_gh200.seams.runtime import Runtime

TRAINING, SAVING, FINISHING = "train", "save", "finish"
"""Phases of the summary. The last one is all that follows the last step: final weights, a last validation, uploads."""


class LoopWatch:
    """Between ``install`` and ``remove`` features hear of the loop's moments, and its phases are told apart."""

    def __init__(self, trainer: Any, runtime: Runtime) -> None:
        self._runtime = runtime
        self._patches = Patches()
        self._last_batch: float | None = None
        self._places = (
            (trainer, "_exit_on_signal", self._turn),
            (trainer.accelerator, "accumulate", self._micro_batch),
            (trainer, "checkpoint_state_save", self._save),
        )

    def install(self) -> None:
        self._patches.install(*(wrap_method(*place) for place in self._places if hasattr(*place[:2])))

    def remove(self) -> None:
        self._patches.remove()

    def conclude(self, *, completed: bool) -> None:
        """The loop was left. What a run that failed did after its last micro-batch is no finishing."""
        if completed and self._last_batch is not None:
            self._runtime.phases.end(TRAINING, at=self._last_batch)
            self._runtime.phases.end(FINISHING)
        else:
            self._runtime.phases.end(TRAINING)

    def _turn(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        self._runtime.call("turn_began")
        return result

    def _save(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        phases = self._runtime.phases
        phases.end(TRAINING)
        try:
            written = wrapped(*args, **kwargs)
        finally:
            seconds = phases.end(SAVING)
        self._runtime.call("checkpoint_saved", seconds)
        return written

    @contextmanager
    def _noted(self, block: AbstractContextManager[None]) -> Iterator[None]:
        with block:
            yield
        self._last_batch = time.perf_counter()
        self._runtime.call("micro_batch_done")

    def _micro_batch(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        return self._noted(wrapped(*args, **kwargs))
