"""Where CPU and GPU share one pool (GB10) nothing is killed when memory runs out: the machine freezes.

There a run ends with an error before that, at its next batch, or in the middle of what it does if no batch comes soon.
"""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.ceilings import end_mark
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.host import ROOT, host_memory
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")

EVERY_SECONDS = 0.5
PATIENCE_SECONDS = 5.0
"""For the next batch, at which the run ends in good order."""


class PressureFeature(Feature):
    name: ClassVar[str] = "pressure"

    root: ClassVar[Path] = ROOT
    """Where the machine's memory is read from."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._ending: MemoryRoomError | None = None
        self._thread: threading.Thread | None = None

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "auto" if settings.any_given else "off"

    def before_train(self, trainer: Any) -> None:
        if detect.single_pool():
            self._thread = threading.Thread(target=self._watch, name="gh200-pressure", daemon=True)
            self._thread.start()

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        if self._ending is not None:
            raise self._ending
        return batch

    def after_train(self, trainer: Any) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            try:
                memory = host_memory(self.root)
            except Exception as failure:  # noqa: BLE001 - a guard must not end what it guards; said right here
                logger.warning("gh200: available memory is no longer watched: %s: %s", type(failure).__name__, failure)
                return
            if memory.available < end_mark(memory.total):
                self._end_run(memory.available)
                return

    def _end_run(self, available: int) -> None:
        self._ending = MemoryRoomError(
            f"only {format_bytes(available)} is left of the memory that CPU and GPU share here: the run ends before "
            "the machine freezes",
            remedy="lower train_batch_size or the model's memory (gradient checkpointing, quantisation), or "
            "memory_limit_gb of datasets and caches",
        )
        logger.error("gh200: %s", self._ending)
        self.runtime.outcome.fail(self._ending)
        if not self._stop.wait(PATIENCE_SECONDS):
            _thread.interrupt_main()  # validating, saving or loading: no batch comes


FEATURE = PressureFeature
