"""PYTORCH_CUDA_ALLOC_CONF with the keys of the earlier, privately patched torch: kept away from stock torch.

Stock torch raises at its first CUDA use when it meets ``use_uvm`` there, and may crash at the next. The keys' meaning
moves into our own settings; a build of torch that knows them gets them as they are.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.parts.oversubscription import PART

logger = logging.getLogger("simpletuner_gh200")

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
OURS = ("use_uvm", "uvm_oversubscription_ratio", "uvm_access_pattern")
"""Keys of the patched builds, by the same names as in ``gh200_optimizations``."""

PASSED_ON = {key: PART.environment[key] for key in OURS}
"""Key -> the variable that carries it to our configuration."""


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


def parse(text: str) -> list[tuple[str, str]]:
    """``a:1,b:[2,3]`` -> [("a", "1"), ("b", "[2,3]")]: commas inside brackets belong to the value."""
    items, depth, start = [], 0, 0
    for position, letter in enumerate(text + ","):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            items.append(text[start:position])
            start = position + 1
    pairs = (item.partition(":") for item in items if item.strip())
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def translate(text: str) -> Translation:
    """Take our keys out of an allocator configuration."""
    kept: list[str] = []
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in parse(text):
        if key not in OURS:
            kept.append(f"{key}:{value}" if value else key)
            continue
        try:
            settings[key] = _value(key, value)
        except ValueError as unreadable:
            problems.append(f"{key}:{value} ({unreadable})")
    return Translation(",".join(kept), settings, tuple(problems))


def _value(key: str, text: str) -> Any:
    if key == "use_uvm":
        lowered = text.lower()
        if lowered not in {"true", "false"}:
            raise ValueError("True or False is accepted")
        return lowered == "true"
    if key == "uvm_oversubscription_ratio":
        ratio = float(text)
        if not ratio > 0:
            raise ValueError("a number above 0 is accepted")
        return ratio
    if text not in {"gpu_first", "balanced", "cpu_first"}:
        raise ValueError("gpu_first, balanced or cpu_first is accepted")
    return text


def activate(environment: MutableMapping[str, str]) -> None:
    """Clean the allocator variables. Call it before torch's first CUDA use; ``import torch`` may have happened already.

    The wishes go on as our own variables, which the configuration overrides, and which child processes inherit. A
    build of torch that knows the keys keeps them.
    """
    for name in VARIABLES:
        found = translate(environment.get(name, ""))
        if not found.changed or knows_uvm(_torch_libraries()):
            continue
        if found.kept:
            environment[name] = found.kept
        else:
            del environment[name]
        for key, value in found.settings.items():
            environment.setdefault(PASSED_ON[key], str(value))
        logger.warning("gh200: %s", notice(name, found))


def notice(variable: str, found: Translation) -> str:
    """What a user is told."""
    moved = ", ".join(f"{key}={value}" for key, value in found.settings.items())
    text = f"{variable}: stock PyTorch doesn't know these keys and would crash on them"
    if moved:
        text += f"; taken over as gh200_optimizations: {moved}"
    if found.problems:
        text += f"; dropped: {', '.join(found.problems)}"
    return text


def knows_uvm(libraries: Path | None) -> bool:
    """Does the torch whose libraries are there know these keys? Its own text tells, not a version."""
    if libraries is None:
        return False
    files = (libraries / name for name in ("libc10_cuda.so", "libc10.so"))
    return any(OURS[1].encode() in file.read_bytes() for file in files if file.exists())


def _torch_libraries() -> Path | None:
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent / "lib" if found is not None and found.origin else None
