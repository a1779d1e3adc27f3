"""From SimpleTuner's parsed configuration to our settings, in the process that trains."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from simpletuner_gh200.config.legacy import LEGACY_FLAG
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.training import training_from
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.upstream.check import check_installed

logger = logging.getLogger("simpletuner_gh200")


def configure_from(trainer: Any, runtime: Runtime) -> None:
    """Read our blocks off ``trainer.config``, take them off it again, and decide which features are on.

    Taking them off leaves SimpleTuner's own configuration object as it would be without us, down to the values it
    hashes and writes into trackers.
    """
    runtime.trainer = trainer
    given = _take_blocks(trainer.config)
    training = training_from(vars(trainer.config), given, os.environ)
    runtime.in_memory_for_all = training.modern.in_memory_for_all
    runtime.raw_config = training.values
    settings = training.raise_if_bad()
    for note in settings.notes:
        logger.info("gh200: %s", note)
    runtime.configure(settings, verdict=lambda: check_installed().features)


def _take_blocks(config: Any) -> dict[str, Any]:
    """Our flags, as they came through SimpleTuner's parser; the attributes are removed."""
    given: dict[str, Any] = {}
    older = vars(config).pop(LEGACY_FLAG, None)
    if older:
        given.update(json.loads(older) if isinstance(older, str) else older)
    for block in TRAINING_BLOCKS:
        value = vars(config).pop(block, None)
        if value not in (None, ""):
            given[block] = value
    return given
