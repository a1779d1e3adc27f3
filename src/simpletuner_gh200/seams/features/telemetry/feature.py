"""Telemetry of a training run: one record per optimizer step, and our numbers in trackers and status events."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from simpletuner_gh200.config.environment import TELEMETRY, flag
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import ConfigError, Problem
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.telemetry.records import (
    caching_record,
    end_record,
    sources,
    start_record,
    step_record,
    tracked,
)
from simpletuner_gh200.telemetry.measure import Sampler, StepClock
from simpletuner_gh200.telemetry.reading import FILE
from simpletuner_gh200.telemetry.sink import JsonLines

logger = logging.getLogger("simpletuner_gh200")

"""1: record even where no block of ours is set; 0: never."""

OF_THE_LOOP = "train_loss"
"""The key by which upstream's values of a finished optimizer step are told from others that go to the trackers."""


def harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Whatever goes wrong in telemetry ends telemetry, with one warning, and not training."""

    @functools.wraps(method)
    def guarded(self: TelemetryFeature, *arguments: Any) -> None:
        if self.broken:
            return
        try:
            method(self, *arguments)
        except Exception as failure:  # noqa: BLE001 - the promise of this feature; said right here
            self.broken = True
            logger.warning("gh200: telemetry is off: %s: %s", type(failure).__name__, failure)

    return guarded


class TelemetryFeature(Feature):
    name: ClassVar[str] = "telemetry"

    def __init__(self) -> None:
        self.broken = False
        self._clock = StepClock()
        self._sink: JsonLines | None = None
        self._sampler: Sampler | None = None
        self._trainer: Any = None
        self._last: dict[str, float] = {}
        self._steps = 0

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        try:
            recorded = flag(TELEMETRY, environment)
        except ValueError as bad:
            raise ConfigError([Problem(TELEMETRY, str(bad))]) from None
        if recorded is not None:
            return "auto" if recorded else "off"
        return "auto" if settings.any_given or settings.in_memory_datasets else "off"

    # -- moments ---------------------------------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        self._trainer, self._sink = trainer, None

    @harmless
    def caching_told(self, told: Mapping[str, Any]) -> None:
        self._sink = self._sink or JsonLines(_path(self._trainer))
        self._sink.write(caching_record(told))

    @harmless
    def before_train(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sink = self._sink or JsonLines(_path(trainer))
        self._sink.write(start_record(self.runtime, trainer))
        self._sampler = Sampler(sources(trainer))
        self._sampler.start()
        self._clock.batch_requested()
        self._clock.step_done()  # the first step begins here, not when the process did

    @harmless
    def turn_began(self) -> None:
        self._clock.batch_requested()

    @harmless
    def micro_batch_done(self) -> None:
        self._clock.batch_done()

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        self._count(batch)
        return batch

    @harmless
    def _count(self, batch: dict[str, Any]) -> None:
        latents = batch.get("latents")
        self._clock.batch_ready(len(latents) if latents is not None else 0)

    @harmless
    def step_logged(self, values: dict[str, Any], step: int | None) -> None:
        if OF_THE_LOOP not in values or self._sink is None or self._sampler is None:
            return
        world = int(self._trainer.accelerator.num_processes)
        tellers = (each for each in self.runtime.features_on if type(each).telemetry is not Feature.telemetry)
        numbers = {feature.name: feature.telemetry() for feature in tellers}
        record = step_record(step, self._clock.step_done(), world, values, self._sampler.latest, numbers)
        self._sink.write(record)
        self._steps += 1
        self._last = tracked(record)
        values.update(self._last)

    @harmless
    def checkpoint_saved(self, seconds: float) -> None:
        self._clock.checkpoint_saved(seconds)

    @harmless
    def event_sent(self, values: dict[str, Any]) -> None:
        values.update(self._last)

    def close(self) -> None:
        """Thread and file go, broken or not; the end is recorded only where what came before it was."""
        if self._sampler is not None:
            self._sampler.stop()
        self._record_end()
        if self._sink is not None:
            self._sink.close()

    @harmless
    def _record_end(self) -> None:
        if self._sink is not None:
            self._sink.write(end_record(self.runtime, dropped=self._sink.dropped))

    def summary(self) -> dict[str, Any]:
        if self._sink is None:
            return {}
        dropped = self._sink.dropped
        return {"file": str(self._sink.path), "steps": self._steps, "dropped": dropped, "broken": self.broken}


def _path(trainer: Any) -> Path:
    """The main process writes the file of the run; the others leave theirs beside it."""
    folder = Path(str(trainer.config.output_dir))
    if trainer.accelerator.is_main_process:
        return folder / FILE
    return folder / FILE.with_name(f"telemetry.rank{trainer.accelerator.process_index}.jsonl")


FEATURE = TelemetryFeature
