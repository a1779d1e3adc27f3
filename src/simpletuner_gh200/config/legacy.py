"""Older spellings of our settings: accepted, turned into today's, and reported as what they now mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simpletuner_gh200.config.blocks import InMemorySettings, RampSettings
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.errors import Problem

LEGACY_FLAG = "gh200_older_spellings"
"""The flag by which older spellings travel through SimpleTuner's argument parser."""

_RAMP_KEYS = tuple(RampSettings.model_fields)

OLDER_KEYS = ("data_backend", "use_gh200_trainer", *_RAMP_KEYS)
"""Top-level keys of a training configuration that we take although they are not blocks of ours."""

_CHUNK_SIZE = "in_memory_chunk_size"
_OLDER_IN_MEMORY = {"in_memory_limit_gb": "memory_limit_gb", "in_memory_compression_lib": "compression"}


@dataclass
class Modern:
    """A configuration in today's spelling."""

    blocks: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    in_memory_for_all: dict[str, Any] | None = None
    """An ``in_memory`` block for every image dataset of the data backend file."""
    problems: list[Problem] = field(default_factory=list)
    """Older spellings that are not understood."""


def modernise(config: Mapping[str, Any]) -> Modern:
    """Pick our blocks out of a training configuration, older spellings included."""
    plain = {key.lstrip("-"): value for key, value in config.items()}
    modern = Modern({block: block_from(plain[block]) for block in TRAINING_BLOCKS if block in plain})
    _ramp_at_top_level(plain, modern)
    _data_backend(plain.get("data_backend"), modern)
    if "use_gh200_trainer" in plain:
        modern.notes.append("use_gh200_trainer has no effect: the extension needs no trainer of its own")
    return modern


def block_from(value: Any) -> Any:
    """A block that travelled as JSON text, as a mapping again; anything else is left for validation to refuse."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _ramp_at_top_level(plain: Mapping[str, Any], modern: Modern) -> None:
    found = {key: plain[key] for key in _RAMP_KEYS if key in plain}
    if not found:
        return
    if "initial_effective_batch_size" in found:
        found.setdefault("enable_batch_size_rampup", True)
    block = modern.blocks.get("gh200_optimizations") or {}
    if isinstance(block, Mapping):
        modern.blocks["gh200_optimizations"] = {**found, **block}
    names = ", ".join(sorted(key for key in found if key in plain))
    modern.notes.append(f"{names} at top level: read as gh200_optimizations.*")


def _older_in_memory(where: str, settings: Mapping[str, Any], modern: Modern) -> dict[str, Any]:
    """The keys of an ``in_memory`` block; what is none of them is a problem, named where it stands."""
    block: dict[str, Any] = {}
    for key, setting in settings.items():
        name = _OLDER_IN_MEMORY.get(str(key), str(key))
        if key == _CHUNK_SIZE:
            modern.notes.append(f"{where}.{key} has no effect: files are staged in one pass")
        elif name in InMemorySettings.model_fields:
            block[name] = setting
        else:
            accepted = ", ".join((*InMemorySettings.model_fields, *_OLDER_IN_MEMORY, _CHUNK_SIZE))
            modern.problems.append(Problem(f"{where}.{key} = {setting!r}", "unknown key", f"accepted: {accepted}"))
    return block


def _data_backend(value: Any, modern: Modern) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or value.get("type") != "in_memory":
        remedy = 'the one accepted form is {"type": "in_memory", "config": {...}}'
        modern.problems.append(Problem("data_backend", f"{value!r} is not understood", remedy))
        return
    settings: Any = value.get("config") or {}
    if not isinstance(settings, Mapping):
        modern.problems.append(Problem("data_backend.config", f"{settings!r} is not a block"))
        return
    others = {key: setting for key, setting in value.items() if key not in {"type", "config"}}
    # What stands beside the type, without a block around it, is as plainly meant.
    modern.in_memory_for_all = {
        **_older_in_memory("data_backend", others, modern),
        **_older_in_memory("data_backend.config", settings, modern),
    }
    modern.notes.append('data_backend of type "in_memory": read as "type": "in_memory" on every image dataset')
