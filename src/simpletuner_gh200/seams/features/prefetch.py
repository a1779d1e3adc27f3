"""``prefetch_depth``: SimpleTuner's own prefetching, switched on with that queue length.

Its thread then collates batches ahead of the step, and our copies to the device run ahead with it. It is upstream's
option: random numbers are drawn in the order upstream draws them when it prefetches, which is not that of a run
without.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.config.blocks import PrefetchSettings
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.seams.feature import Feature, Request

logger = logging.getLogger("simpletuner_gh200")


class PrefetchFeature(Feature):
    name = "prefetch"

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "requested" if isinstance(settings.part(PrefetchSettings).prefetch_depth, int) else "off"

    def start(self, trainer: Any) -> None:
        depth = self.settings.part(PrefetchSettings).prefetch_depth
        trainer.config.dataloader_prefetch = True
        trainer.config.dataloader_prefetch_qlen = depth
        logger.info("gh200: prefetch_depth: SimpleTuner's dataloader_prefetch is on, with a queue of %s", depth)

    def summary(self) -> dict[str, Any]:
        return {"depth": self.settings.part(PrefetchSettings).prefetch_depth}


FEATURE = PrefetchFeature
