"""Our blocks as fields: SimpleTuner builds its argument parser, its terminal wizard and its Web UI from this registry.

In the Web UI a field for every key stands in for the two blocks (``points/web_ui.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.config.legacy import LEGACY_FLAG
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.seams.patch import Patch, put
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam

HIDDEN_TAB = "gh200"
"""No tab that anybody opens: what is there is a legal flag, and shown and found nowhere."""

_LABELS = {"cache_config": "GH200 caches", "gh200_optimizations": "GH200 optimizations"}


def _fields(module: ModuleType) -> list[Any]:
    types = importlib.import_module(module.__name__.rpartition(".")[0] + ".types")
    as_json = getattr(types.FieldType, "TEXT_JSON", types.FieldType.TEXTAREA)
    shown = [
        types.ConfigField(
            name=block,
            arg_name=f"--{block}",
            ui_label=_LABELS[block],
            field_type=as_json,
            tab="hardware",
            section="gh200",
            default_value=None,
            importance=types.ImportanceLevel.ADVANCED,
            help_text=f"The {block} block of simpletuner-gh200, as JSON.",
        )
        for block in TRAINING_BLOCKS
    ]
    older = types.ConfigField(
        name=LEGACY_FLAG,
        arg_name=f"--{LEGACY_FLAG}",
        ui_label="GH200 older spellings",
        field_type=types.FieldType.TEXTAREA,
        tab=HIDDEN_TAB,
        section="gh200",
        default_value=None,
        importance=types.ImportanceLevel.EXPERIMENTAL,
        help_text="Older spellings found in the configuration; filled in by simpletuner-gh200.",
    )
    return [*shown, older]


def _add_field(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    registry = module.field_registry
    return [put(registry._fields, field.name, field) for field in _fields(module)]


SEAMS = (Seam("field_registry.add_field", _add_field),)
