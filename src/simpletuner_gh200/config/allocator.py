"""``PYTORCH_CUDA_ALLOC_CONF``: the keys of the earlier guides, which stock torch rejects at its first use of CUDA."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from simpletuner_gh200.config.blocks import STATE_VARIABLES, StateSettings, part_with
from simpletuner_gh200.config.environment import ACTIVATIONS, ALLOCATOR
from simpletuner_gh200.config.files import find_package

logger = logging.getLogger("simpletuner_gh200")

OUR_KEYS = STATE_VARIABLES
"""Keys of the earlier guides, which only privately patched torch knows, and the variables that carry their meaning."""

INSTEAD = (
    "the patched build of the earlier guides gave all of torch's memory out of managed memory, whose pages the driver "
    "moved; here optimizer state and EMA live in Grace (use_uvm), and saved activations where that is faster "
    "(activations: auto)"
)
"""What became of ``use_uvm:True``."""


def split_options(text: str) -> list[tuple[str, str]]:
    """``a:1,b:[256:1,>:2]`` -> [("a", "1"), ("b", "[256:1,>:2]")]; commas inside brackets don't separate."""
    options: list[tuple[str, str]] = []
    for piece in re.split(r",(?![^\[]*\])", text):
        key, _, value = piece.strip().partition(":")
        if key.strip():
            options.append((key.strip(), value.strip()))
    return options


def join_options(options: Sequence[tuple[str, str]]) -> str:
    return ",".join(f"{key}:{value}" for key, value in options)


@dataclass(frozen=True)
class TorchBuild:
    """What can be said of an installed torch without importing it."""

    version: str
    cuda: str | None
    hip: str | None


def find_torch(search_path: Sequence[str] | None = None) -> TorchBuild | None:
    """The torch that ``import torch`` would take from ``search_path`` (default: this interpreter's), or None."""
    folder = find_package("torch", search_path)
    if folder is None:
        return None
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return TorchBuild("unknown", None, None)
    return TorchBuild(_assigned(text, "__version__") or "unknown", _assigned(text, "cuda"), _assigned(text, "hip"))


# -- the keys of the earlier guides --------------------------------------------------------------------


def carried_over(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment of a run with the extension on, and what to say about it.

    Our keys leave the allocator's variables. Their wishes go on as our own variables, which the configuration
    overrides.
    """
    settled, notes = dict(environment), []
    for name in ALLOCATOR:
        options = split_options(settled.get(name, ""))
        ours = {key: value for key, value in options if key in OUR_KEYS}
        if not ours:
            continue
        settled.pop(name)
        if others := join_options([option for option in options if option[0] not in OUR_KEYS]):
            settled[name] = others
        taken: dict[str, Any] = {}
        dropped = []
        for key, text in ours.items():
            try:
                taken[key] = part_with(StateSettings).value_in(key, text)
                settled.setdefault(OUR_KEYS[key], str(taken[key]))
            except ValueError as unreadable:
                dropped.append(f"{key}:{text} ({unreadable})")
        notes.append(f"{name}: PyTorch doesn't know these keys and would crash on them")
        if taken:
            shown = ", ".join(f"{key}={value}" for key, value in taken.items())
            notes[-1] += f"; taken over as gh200_optimizations: {shown}"
        if dropped:
            notes[-1] += f"; dropped: {', '.join(dropped)}"
        if taken.get("use_uvm"):
            settled.setdefault(ACTIVATIONS, "auto")
            notes[-1] += f"; {INSTEAD}"
    return settled, notes


# -- reading a torch -----------------------------------------------------------------------------------


def _assigned(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def activate(environment: MutableMapping[str, str]) -> None:
    """Clean the allocator variables before torch's first CUDA use: stock torch raises there when it meets our keys.

    What they ask for goes on as our own variables, which child processes inherit.
    """
    settled, notes = carried_over(environment)
    for name in ALLOCATOR:
        environment.pop(name, None)
    environment.update({name: value for name, value in settled.items() if environment.get(name) != value})
    for note in notes:
        logger.warning("gh200: %s", note)
