"""Which part of the loop is saving: checkpoints on the way, and what is written when the last step is done.

Both are seen on objects of this run: in SimpleTuner's method that writes a checkpoint, and in
``accelerator.accumulate``, whose last leaving is the end of training itself. Where SimpleTuner has no such method,
saving counts as training.
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

_METHOD = "checkpoint_state_save"


class SavingWatch:
    """Between ``install`` and ``remove`` the phases of one trainer's loop are told apart."""

    def __init__(self, trainer: Any, runtime: Runtime) -> None:
        self._trainer, self._runtime = trainer, runtime
        self._patches = Patches()
        self._last_batch: float | None = None

    def install(self) -> None:
        self._patches.install(wrap_method(self._trainer.accelerator, "accumulate", self._micro_batch))
        if hasattr(self._trainer, _METHOD):
            self._patches.install(wrap_method(self._trainer, _METHOD, self._save))

    def remove(self) -> None:
        self._patches.remove()

    def conclude(self, *, completed: bool) -> None:
        """The loop was left. What a run that failed did after its last micro-batch is no finishing."""
        if completed and self._last_batch is not None:
            self._runtime.phases.end(TRAINING, at=self._last_batch)
            self._runtime.phases.end(FINISHING)
        else:
            self._runtime.phases.end(TRAINING)

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

    def _micro_batch(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        return self._noted(wrapped(*args, **kwargs))
