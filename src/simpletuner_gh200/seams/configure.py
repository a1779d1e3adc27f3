"""From SimpleTuner's parsed configuration to our settings, in the process that trains."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from simpletuner_gh200.config.files import read_datasets
from simpletuner_gh200.config.legacy import LEGACY_FLAG, Modern, modernise
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.settings import resolve, resolve_dataset
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
    modern = modernise(given)
    runtime.in_memory_for_all = modern.in_memory_for_all
    runtime.raw_config = {**vars(trainer.config), **given}
    datasets = _in_memory_datasets(trainer.config, modern)
    settings = resolve(modern.blocks, os.environ, notes=tuple(modern.notes), in_memory_datasets=datasets)
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


def _in_memory_datasets(config: Any, modern: Modern) -> tuple[str, ...]:
    """Ids of the datasets to hold in memory; their blocks are checked here, before anything is built."""
    path = getattr(config, "data_backend_config", None)
    # Anything but a path is upstream's to refuse; its own tests pass stand-ins here.
    if not path or not isinstance(path, str | os.PathLike) or not os.path.exists(path):
        return ()
    found = []
    for entry in with_in_memory_for_all(read_datasets(path), modern.in_memory_for_all):
        if entry.get("type") == "in_memory" and not entry.get("disabled") and not entry.get("disable"):
            resolve_dataset(entry.get("in_memory"), where=f"dataset {entry.get('id')!r}.in_memory")
            found.append(str(entry.get("id")))
    return tuple(found)


def with_in_memory_for_all(entries: list[dict[str, Any]], block: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The entries with the older training-wide ``data_backend`` spelling applied to every local image dataset."""
    if block is None:
        return entries
    return [
        {**entry, "type": "in_memory", "in_memory": block}
        if entry.get("type", "local") == "local" and entry.get("dataset_type", "image") == "image"
        else entry
        for entry in entries
    ]
