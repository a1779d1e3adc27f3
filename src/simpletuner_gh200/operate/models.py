"""The model families that ``gh200 init`` knows how to start with, as data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.errors import UsageError


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
            "sdxl",
            "stabilityai/stable-diffusion-xl-base-1.0",
            "StableDiffusionXLPipeline",
            ("BasicTransformerBlock",),
        ),
        Family("sd3", "stabilityai/stable-diffusion-3.5-large", "StableDiffusion3Pipeline", ("JointTransformerBlock",)),
        Family("qwen_image", "Qwen/Qwen-Image", "QwenImagePipeline", ("QwenImageTransformerBlock",)),
    )
}


@dataclass(frozen=True)
class Model:
    """A family and where its weights are."""

    family: Family
    weights: str
    local: bool = False


def choose_model(text: str) -> Model:
    """``flux``, ``sdxl=some/repository`` or a folder with a diffusers pipeline."""
    name, _, weights = text.partition("=")
    if name in FAMILIES:
        return Model(
            FAMILIES[name], weights or FAMILIES[name].weights, local=Path(weights).is_dir() if weights else False
        )
    folder = Path(text)
    if (folder / "model_index.json").is_file():
        return Model(_family_of(folder), str(folder.absolute()), local=True)
    accepted = ", ".join(FAMILIES)
    raise UsageError(
        f"--model {text!r}: neither a family nor a folder with a model_index.json",
        remedy=f"families: {accepted}; FAMILY=REPOSITORY names other weights; any other family: edit config.json",
    )


def _family_of(folder: Path) -> Family:
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    pipeline = index.get("_class_name")
    for family in FAMILIES.values():
        if family.pipeline == pipeline:
            return family
    raise UsageError(
        f"{folder}: a {pipeline}, which `gh200 init` has no starting point for",
        remedy=f"families: {', '.join(FAMILIES)}; write config.json by hand for others: `gh200 train` takes any",
    )
