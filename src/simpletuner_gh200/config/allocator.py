"""``PYTORCH_CUDA_ALLOC_CONF``: its keys, and which of them an installed torch would reject.

torch parses the variable at the first use of CUDA and raises on a key it doesn't know. Which keys it knows is not
written down anywhere a program can ask without a GPU; but its parser compares with literal names, and those are in
the library. So the library itself is asked: that is right for stock releases and for privately patched builds alike.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from simpletuner_gh200.config.blocks import STATE_VARIABLES, StateSettings
from simpletuner_gh200.config.environment import ACTIVATIONS, ALLOCATOR, flag_from_text
from simpletuner_gh200.config.packages import find_package

OUR_KEYS = STATE_VARIABLES
"""Keys of the earlier guides, which only privately patched torch knows, and the variables that carry their meaning."""

INSTEAD = (
    "the patched build of the earlier guides gave all of torch's memory out of managed memory, whose pages the driver "
    "moved; here optimizer state and EMA live in Grace (use_uvm), and saved activations where that is faster "
    "(activations: auto)"
)
"""What became of ``use_uvm:True``."""

PINNED_KEY = "pinned_max_round_threshold_mb"
PINNED_ADVICE = f"{PINNED_KEY}:16"
"""Pinned tensors above it are not rounded up to a power of two. Smaller than a layer, larger than most batches."""

_PARSERS = ("libc10.so", "libc10_cuda.so")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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

    folder: Path
    version: str
    cuda: str | None
    hip: str | None

    def knows(self, key: str) -> bool:
        """Would its allocator accept this key? True where there is no CUDA allocator that could refuse."""
        libraries = [self.folder / "lib" / name for name in _PARSERS]
        if not _KEY.fullmatch(key) or not libraries[1].is_file():
            return self.cuda is None
        return any(_holds_word(library, key.encode()) for library in libraries if library.is_file())


def find_torch(search_path: Sequence[str] | None = None) -> TorchBuild | None:
    """The torch that ``import torch`` would take from ``search_path`` (default: this interpreter's), or None."""
    folder = find_package("torch", search_path)
    if folder is None:
        return None
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return TorchBuild(folder, "unknown", None, None)
    return TorchBuild(
        folder, _assigned(text, "__version__") or "unknown", _assigned(text, "cuda"), _assigned(text, "hip")
    )


def rejected_keys(text: str, torch: TorchBuild | None) -> list[str]:
    """The keys in ``text`` that would make this torch raise at its first use of CUDA."""
    if torch is None:
        return []
    return [key for key, _value in split_options(text) if not torch.knows(key)]


# -- the keys of the earlier guides --------------------------------------------------------------------


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


def carried_over(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment of a run with the extension on, and what to tell about it.

    Our keys leave the allocator's variables. Their wishes go on as our own variables, which the configuration
    overrides. A build of torch that knows the keys keeps them.
    """
    settled, told = dict(environment), []
    for name in ALLOCATOR:
        found = translate(settled.get(name, ""))
        if not found.changed or knows_uvm(find_torch()):
            continue
        settled.pop(name)
        if found.kept:
            settled[name] = found.kept
        for key, value in found.settings.items():
            settled.setdefault(OUR_KEYS[key], str(value))
        if found.settings.get("use_uvm"):
            settled.setdefault(ACTIVATIONS, "auto")
        told.append(notice(name, found))
    return settled, told


# -- reading a torch -----------------------------------------------------------------------------------


def _assigned(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _holds_word(library: Path, word: bytes) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return re.search(rb"(?<![A-Za-z0-9_])" + word + rb"(?![A-Za-z0-9_])", content) is not None
