"""Settings of a plan written into a copy of the configuration; the file itself stays as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import UsageError


def with_settings(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with ``key`` and ``block.key`` set; nothing that was there is lost."""
    changed = dict(values)
    for name, value in settings.items():
        block, _, key = name.rpartition(".")
        if block:
            before = changed.get(block)
            changed[block] = {**(before if isinstance(before, Mapping) else {}), key: value}
        else:
            changed[name] = value
    return changed


def write_copy(training: Training, settings: Mapping[str, Any]) -> Path:
    """Beside the configuration, ``config.json`` as ``config.planned.json``; returns where."""
    path = training.located.path if training.located is not None else None
    if path is None:
        raise UsageError("there is no configuration file to copy", remedy="name one")
    if path.suffix == ".env":
        raise UsageError(
            f"{path}: a plan can't be applied to a .env file, which holds more than we read of it",
            remedy=f"set there by hand: {', '.join(f'{key}={value}' for key, value in settings.items())}",
        )
    target = path.with_suffix(".planned.json")
    try:
        target.write_text(json.dumps(with_settings(training.values, settings), indent=2) + "\n", encoding="utf-8")
    except OSError as refused:
        raise UsageError(
            f"cannot write {target}: {refused.strerror}", remedy="copy the configuration elsewhere"
        ) from None
    return target
