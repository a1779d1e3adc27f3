"""Memory pressure in a running training: what we hold for speed goes back before the kernel kills the run.

Where CPU and GPU share one pool there is no kill: the machine freezes. There a run that has nothing left to give back
ends with an error, at its next batch, or in the middle of what it is doing if no batch comes soon.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.host import ROOT, host_memory
from simpletuner_gh200.memory.pressure import PressureValve, Relief
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")

EVERY_SECONDS = 0.5
PATIENCE_SECONDS = 5.0
"""For the next batch, at which a run that must end does so in good order."""


class PressureFeature(Feature):
    name: ClassVar[str] = "pressure"

    root: ClassVar[Path] = ROOT
    """Where the machine's memory is read from."""

    def __init__(self) -> None:
        self._valve: PressureValve | None = None
        self._stop = threading.Event()
        self._one_pool = False
        self._ending: MemoryRoomError | None = None
        self._thread: threading.Thread | None = None

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "auto" if settings.any_given else "off"

    def before_train(self, trainer: Any) -> None:
        self._one_pool = detect.single_pool()
        reliefs: list[Relief] = [relief for feature in self.runtime.features_on for relief in feature.memory_relief()]
        if not reliefs and not self._one_pool:
            return
        self._valve = PressureValve(reliefs)
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

    def summary(self) -> dict[str, Any]:
        return {"given_back": list(self._valve.given)} if self._valve is not None else {}

    def telemetry(self) -> dict[str, Any]:
        return {"given_back": len(self._valve.given)} if self._valve is not None else {}

    def _watch(self) -> None:
        assert self._valve is not None
        while not self._stop.wait(EVERY_SECONDS) and (self._one_pool or not self._valve.exhausted):
            try:
                memory = host_memory(self.root)
                given = self._valve.observe(memory.available, memory.total, time.monotonic())
            except Exception as failure:  # noqa: BLE001 - a guard must not end what it guards; said right here
                logger.warning("gh200: memory pressure is no longer monitored: %s: %s", type(failure).__name__, failure)
                return
            if given is not None:
                left, size = format_bytes(memory.available), format_bytes(given[1])
                logger.warning("gh200: only %s of memory left: gave back %s (%s)", left, given[0], size)
            elif self._one_pool and self._valve.must_end(memory.available, memory.total, time.monotonic()):
                self._end_run(memory.available)
                return

    def _end_run(self, available: int) -> None:
        self._ending = MemoryRoomError(
            f"only {format_bytes(available)} is left of the memory that CPU and GPU share here, and nothing is left to "
            f"give back: the run ends before the machine freezes",
            remedy="lower train_batch_size or the model's memory (gradient checkpointing, quantisation), or "
            "memory_limit_gb of datasets and caches",
        )
        logger.error("gh200: %s", self._ending)
        self.runtime.outcome.end(self._ending)
        if not self._stop.wait(PATIENCE_SECONDS):
            _thread.interrupt_main()  # validating, saving or loading: no batch comes


FEATURE = PressureFeature
