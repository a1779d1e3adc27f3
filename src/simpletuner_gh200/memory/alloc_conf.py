"""PYTORCH_CUDA_ALLOC_CONF with the keys of the earlier, privately patched torch: kept away from stock torch.

Stock torch raises at its first CUDA use when it meets ``use_uvm`` there, and may crash at the next. The keys' meaning
moves into our own settings; a build of torch that knows them gets them as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, get_args

from simpletuner_gh200.config.allocator import (
    INSTEAD,
    OUR_KEYS,
    VARIABLES,
    TorchBuild,
    find_torch,
    join_options,
    split_options,
)
from simpletuner_gh200.config.blocks import ACTIVATIONS_VARIABLE, StateSettings
from simpletuner_gh200.config.part import flag_from_text

logger = logging.getLogger("simpletuner_gh200")


@dataclass(frozen=True)
class Translation:
    """What becomes of one variable."""

    kept: str
    """What stock torch may see; empty: unset the variable."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The same wishes as keys of ``gh200_optimizations``."""
    problems: tuple[str, ...] = ()
    """Values that could not be read; these were dropped."""

    @property
    def changed(self) -> bool:
        return bool(self.settings or self.problems)


def translate(text: str) -> Translation:
    """Take our keys out of an allocator configuration; without any, the text stays to the letter."""
    options = split_options(text)
    if not any(key in OUR_KEYS for key, _ in options):
        return Translation(text)
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in options:
        if key in OUR_KEYS:
            try:
                settings[key] = _value(key, value)
            except ValueError as unreadable:
                problems.append(f"{key}:{value} ({unreadable})")
    kept = join_options([(key, value) for key, value in options if key not in OUR_KEYS])
    return Translation(kept, settings, tuple(problems))


def _value(key: str, text: str) -> Any:
    if key == "use_uvm":
        return flag_from_text(text)
    if key == "uvm_oversubscription_ratio":
        ratio = float(text)
        if not ratio > 0:
            raise ValueError("a number above 0 is accepted")
        return ratio
    accepted = get_args(StateSettings.model_fields[key].annotation)
    if text not in accepted:
        raise ValueError(f"accepted: {', '.join(accepted)}")
    return text


def activate(environment: MutableMapping[str, str]) -> None:
    """Clean the allocator variables. Call it before torch's first CUDA use; ``import torch`` may have happened already.

    The wishes go on as our own variables, which the configuration overrides, and which child processes inherit. A
    build of torch that knows the keys keeps them.
    """
    for name in VARIABLES:
        found = translate(environment.get(name, ""))
        if not found.changed or knows_uvm(find_torch()):
            continue
        if found.kept:
            environment[name] = found.kept
        else:
            del environment[name]
        for key, value in found.settings.items():
            environment.setdefault(OUR_KEYS[key], str(value))
        if found.settings.get("use_uvm"):
            environment.setdefault(ACTIVATIONS_VARIABLE, "auto")
        logger.warning("gh200: %s", notice(name, found))


def knows_uvm(torch: TorchBuild | None) -> bool:
    """Is this a build with an allocator of its own for these keys? A CPU build has none that could."""
    return torch is not None and torch.cuda is not None and all(torch.knows(key) for key in OUR_KEYS)


def notice(variable: str, found: Translation) -> str:
    """What a user is told."""
    moved = ", ".join(f"{key}={value}" for key, value in found.settings.items())
    text = f"{variable}: stock PyTorch doesn't know these keys and would crash on them"
    if moved:
        text += f"; taken over as gh200_optimizations: {moved}"
    if found.settings.get("use_uvm"):
        text += f"; {INSTEAD}"
    if found.problems:
        text += f"; dropped: {', '.join(found.problems)}"
    return text
