"""The models that ``gh200 init`` can start with: those of the installed SimpleTuner, and what we know better of some.

Families, their weights and flavours come from the release itself (``upstream/importing.py``); ours are those whose
FSDP blocks were tried. A family that needs more than a folder of pictures is sent to SimpleTuner's own examples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.option_table import ModelFamily


@dataclass(frozen=True)
class Family:
    """``name`` and ``weights`` as SimpleTuner takes them; ``blocks`` are the classes that FSDP wraps one by one."""

    name: str
    weights: str
    pipeline: str
    blocks: tuple[str, ...]
    resolution: int = 1024


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "flux",
            "black-forest-labs/FLUX.1-dev",
            "FluxPipeline",
            ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        ),
        Family(
            "sdxl", "stabilityai/stable-diffusion-xl-base-1.0", "StableDiffusionXLPipeline", ("BasicTransformerBlock",)
        ),
        Family("sd3", "stabilityai/stable-diffusion-3.5-large", "StableDiffusion3Pipeline", ("JointTransformerBlock",)),
        Family("qwen_image", "Qwen/Qwen-Image", "QwenImagePipeline", ("QwenImageTransformerBlock",)),
    )
}
"""With what we know better of them; the others are as the installed release tells."""

_EDITS = ("edit", "kontext")
_SMALL = {"sd1x": 512, "deepfloyd": 64}
"""Families that were made for fewer pixels than 1024."""


@dataclass(frozen=True)
class Model:
    """A family and where its weights are."""

    family: Family
    weights: str
    local: bool = False
    flavour: str | None = None
    """SimpleTuner's name for these weights, where it has one and needs it."""

    @property
    def folders(self) -> list[Path]:
        """Of this machine."""
        return [Path(self.weights)] if self.local else []


def choose_model(text: str, installed: Mapping[str, ModelFamily] | None = None) -> Model:
    """``flux``, ``flux:schnell``, ``sdxl=some/repository`` or a folder with a diffusers pipeline."""
    installed = installed or {}
    folder = Path(text)
    if (folder / "model_index.json").is_file():
        return Model(_family_of(folder, installed), str(folder.absolute()), local=True)
    name, _, weights = text.partition("=")
    name, _, flavour = name.partition(":")
    if name not in FAMILIES and name not in installed:
        raise UsageError(
            f"--model {text!r}: neither a family nor a folder with a model_index.json",
            remedy=f"families: {_names(installed)}; FAMILY:FLAVOUR and FAMILY=REPOSITORY name other weights",
        )
    release = installed.get(name, ModelFamily({}))
    _refuse_what_needs_more(name, flavour, release)
    if flavour and flavour not in release.flavours:
        raise UsageError(f"--model {text!r}: no such flavour", remedy=f"flavours: {', '.join(release.flavours)}")
    family = _family(name, release)
    if weights:
        return Model(family, weights, local=Path(weights).is_dir())
    if flavour:
        return Model(family, release.flavours[flavour], flavour=flavour)
    return Model(family, family.weights, flavour=None if name in FAMILIES else release.default)


def _family(name: str, release: ModelFamily) -> Family:
    """What we know of it, else what the release says."""
    if name in FAMILIES:
        return FAMILIES[name]
    weights = release.flavours.get(release.default or "") or next(iter(release.flavours.values()), "")
    # What embeds and patches is not to be split either, but small: FSDP wraps the repeated blocks.
    blocks = tuple(block for block in release.blocks if block.endswith(("Block", "Layer")) and "." not in block)
    return Family(name, weights, next(iter(release.pipelines), ""), blocks or release.blocks, _SMALL.get(name, 1024))


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


def _family_of(folder: Path, installed: Mapping[str, ModelFamily]) -> Family:
    pipeline = json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
    for name, family in FAMILIES.items():
        if family.pipeline == pipeline:
            return FAMILIES[name]
    for name, release in installed.items():
        if pipeline in release.pipelines:
            _refuse_what_needs_more(name, "", release)
            return _family(name, release)
    raise UsageError(
        f"{folder}: a {pipeline}, which no family here is made of",
        remedy=f"families: {_names(installed)}; FAMILY=FOLDER says which it is",
    )


def _names(installed: Mapping[str, ModelFamily]) -> str:
    return ", ".join(sorted({*FAMILIES, *(name for name, release in installed.items() if release.media == "image")}))
