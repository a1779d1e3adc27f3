"""A ramp out of a training configuration, before any run: only the keys that matter are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.legacy import modernise
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import ConfigError, Problem
from simpletuner_gh200.ramp.plan import plan
from simpletuner_gh200.ramp.report import Report


def report_on(config: Mapping[str, Any], *, world: int | None, source: str) -> tuple[Report, list[str]]:
    """The schedule of a configuration, and notes on how it was read. Raises ConfigError with every problem."""
    modern = modernise(config)
    block = modern.blocks.get("gh200_optimizations")
    notes = list(modern.notes)
    if isinstance(block, Mapping) and not block.get("enable_batch_size_rampup"):
        notes.append("enable_batch_size_rampup is not true: this is the schedule it would give")
        modern.blocks["gh200_optimizations"] = {**block, "enable_batch_size_rampup": True}
    elif block is None:
        modern.blocks["gh200_optimizations"] = {"enable_batch_size_rampup": True}
    settings = resolve(modern.blocks, {}, source=source).part(RampSettings)
    problems: list[Problem] = []
    sizes = {
        "train_batch_size": _whole(config, "train_batch_size", None, problems),
        "max_train_steps": _whole(config, "max_train_steps", None, problems),
        "gradient_accumulation_steps": _whole(config, "gradient_accumulation_steps", 1, problems),
        "num_processes": world if world is not None else _whole(config, "num_processes", 1, problems),
    }
    if problems:
        raise ConfigError(problems, source=source)
    ramp = plan(
        settings,
        train_batch_size=sizes["train_batch_size"],
        world_size=sizes["num_processes"],
        gradient_accumulation_steps=sizes["gradient_accumulation_steps"],
    )
    return Report(ramp, sizes["max_train_steps"]), notes


def _whole(config: Mapping[str, Any], key: str, default: int | None, problems: list[Problem]) -> int:
    raw = config.get(key, default)
    try:
        value = int(str(raw))
    except ValueError:
        value = 0
    if value < 1:
        found = "not set" if raw is None else f"{raw!r} is not a whole number of at least 1"
        problems.append(Problem(key, found, "the schedule needs it"))
    return value
