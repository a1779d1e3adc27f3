"""Placement hints on every prepared batch, and an account of what they achieved."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.config.blocks import CacheSettings, HintSettings, StateSettings
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.hints import optimize_batch_for_gh200, set_uvm_hint_override
from simpletuner_gh200.seams.feature import Feature, Request

logger = logging.getLogger("simpletuner_gh200")

TRIES = 3
LOOK_AGAIN = 500
"""After so many batches without a tensor to help, only every so-many-th is looked at: hints must cost nothing."""


class HintsFeature(Feature):
    name = "hints"

    def __init__(self) -> None:
        self.batches = self.looked_at = self.helped = self.not_helped = 0
        self.reasons: Counter[str] = Counter()
        self._fruitless = 0
        self._pattern: str | None = None

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        """On by the key or the environment; implied by any cache in unified memory; false wins over both."""
        wanted = settings.part(HintSettings).enable_uvm_hints
        if wanted is None:
            wanted = any(settings.part(CacheSettings).served().values())
        if not wanted:
            return "off"
        return "requested" if settings.given("gh200_optimizations.enable_uvm_hints") else "auto"

    def configured(self) -> None:
        """An explicit false must reach direct callers too, although the feature is off then."""
        set_uvm_hint_override(self.settings.part(HintSettings).enable_uvm_hints)
        self._pattern = self.settings.part(StateSettings).uvm_access_pattern

    def start(self, trainer: Any) -> None:
        set_uvm_hint_override(True)
        driver = detect.current()
        if driver.name != "cuda":
            logger.warning("gh200: placement hints have nothing to act on: %s", driver.capabilities(0).absence)

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        self.batches += 1
        if self._fruitless < TRIES or self.batches % LOOK_AGAIN == 0:
            self._look_at(batch)
        return batch

    def _look_at(self, batch: dict[str, Any]) -> None:
        report = optimize_batch_for_gh200(batch, self._pattern)
        self.looked_at += 1
        self.helped += report.helped
        self.not_helped += report.not_helped
        self.reasons.update(report.reasons)
        self._fruitless = 0 if report else self._fruitless + 1
        if self._fruitless == TRIES:
            logger.info(
                "gh200: no batch tensor can be placed: %s", "; ".join(self.reasons) or "no tensor of a known key"
            )

    def summary(self) -> dict[str, Any]:
        return {
            "driver": detect.current().name,
            "batches": self.batches,
            "looked_at": self.looked_at,
            "tensors_helped": self.helped,
            "tensors_not_helped": self.not_helped,
            "why_not": dict(self.reasons),
        }

    def close(self) -> None:
        set_uvm_hint_override(None)


FEATURE = HintsFeature
