"""Seam 2b: our blocks from ``config.env``, as ``CACHE_CONFIG='{...}'`` and ``GH200_OPTIMIZATIONS='{...}'``."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.seams.patch import AnyPatch, EntryPatch
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    return [EntryPatch(module.env_to_args_map, block.upper(), f"--{block}") for block in TRAINING_BLOCKS]


SEAM = Seam("config.env_map", _patches)
