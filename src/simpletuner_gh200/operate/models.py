"""The models that ``gh200 init`` can start with: those of the installed SimpleTuner.

Families, their weights, flavours and blocks come from the release itself (``upstream/importing.py``). A family that
needs more than a folder of pictures is sent to SimpleTuner's own examples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.option_table import ModelFamily

_FIRST = {"flux": "dev", "sd3": "large", "qwen_image": "v1.0"}
"""Flavours that most people mean, where a release would take another by itself."""

_EDITS = ("edit", "kontext")
_SMALL = {"sd1x": 512, "deepfloyd": 64}
"""Families that were made for fewer pixels than 1024."""


@dataclass(frozen=True)
class Model:
    """A family and where its weights are."""

    family: str
    """Its name, as SimpleTuner takes it."""
    weights: str
    blocks: tuple[str, ...] = ()
    """The classes that FSDP wraps one by one."""
    local: bool = False
    flavour: str | None = None
    """SimpleTuner's name for these weights, where it has one."""

    @property
    def resolution(self) -> int:
        """What it was made for."""
        return _SMALL.get(self.family, 1024)

    @property
    def folders(self) -> list[Path]:
        """Of this machine."""
        return [Path(self.weights)] if self.local else []


def choose_model(text: str, installed: Mapping[str, ModelFamily]) -> Model:
    """``flux``, ``flux:schnell``, ``sdxl=some/repository`` or a folder with a diffusers pipeline."""
    if (Path(text) / "model_index.json").is_file():
        name, flavour, weights = _family_of(Path(text), installed), "", str(Path(text).absolute())
    else:
        name, _, weights = text.partition("=")
        name, _, flavour = name.partition(":")
    if name not in installed:
        raise UsageError(
            f"--model {text!r}: neither a family nor a folder with a model_index.json",
            remedy=f"families: {_names(installed)}; FAMILY:FLAVOUR and FAMILY=REPOSITORY name other weights",
        )
    release = installed[name]
    _refuse_what_needs_more(name, flavour, release)
    if flavour and flavour not in release.flavours:
        raise UsageError(f"--model {text!r}: no such flavour", remedy=f"flavours: {', '.join(release.flavours)}")
    # What embeds and patches is not to be split either, but small: FSDP wraps the repeated blocks.
    blocks = tuple(block for block in release.blocks if block.endswith(("Block", "Layer")) and "." not in block)
    blocks = blocks or release.blocks
    if weights:
        return Model(name, weights, blocks, local=Path(weights).is_dir())
    known = [each for each in (flavour, _FIRST.get(name), release.default, *release.flavours) if each]
    taken = next((each for each in known if each in release.flavours), None)
    return Model(name, release.flavours.get(taken or "", ""), blocks, flavour=taken)


def _refuse_what_needs_more(name: str, flavour: str, release: ModelFamily) -> None:
    example = (
        "start from SimpleTuner's own example (simpletuner examples list) and add our blocks: docs/quick-start.md, "
        "which `gh200 examples DIR --pages` writes"
    )
    if release.media != "image":
        raise UsageError(
            f"--model {name}: trains on {release.media}, and `gh200 init` starts with pictures", remedy=example
        )
    if any(word in flavour for word in _EDITS):
        raise UsageError(f"--model {name}:{flavour}: an edit model needs pairs of pictures", remedy=example)


def _family_of(folder: Path, installed: Mapping[str, ModelFamily]) -> str:
    pipeline = json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
    for name, release in installed.items():
        if pipeline in release.pipelines:
            return name
    raise UsageError(
        f"{folder}: a {pipeline}, which no family here is made of",
        remedy=f"families: {_names(installed)}; FAMILY=FOLDER says which it is",
    )


def _names(installed: Mapping[str, ModelFamily]) -> str:
    return ", ".join(sorted(name for name, release in installed.items() if release.media == "image"))
