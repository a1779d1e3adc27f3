"""How large a model is, from its files: safetensors headers and configurations, read without torch.

A model is a folder of parts, on this machine or in the hub's cache. What is not here is looked up among published
sizes (``published.json``), and says so. Traces of published models, made before and kept with the package
(``published_traces.json``, by ``scripts/dev/plan_table.py``), are the basis of quick answers on a fresh machine.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import hub_folder
from simpletuner_gh200.plan.facts import Source
from simpletuner_gh200.plan.traces import Trace
from simpletuner_gh200.telemetry.sink import read_whole
from simpletuner_gh200.upstream.flavours import flavours_of

PUBLISHED = Path(__file__).with_name("published.json")
PUBLISHED_TRACES = Path(__file__).with_name("published_traces.json")

_LONGEST_HEADER = 100 * 1024 * 1024
_NOT_MODELS = ("scheduler", "tokenizer", "feature_extractor", "image_processor", "processor")


@dataclass(frozen=True)
class ModelPart:
    """One part of a pipeline: ``transformer``, ``text_encoder_2``, ``vae``."""

    name: str
    parameters: int
    source: Source
    config: Mapping[str, Any] | None = None
    note: str = ""

    @property
    def kind(self) -> str:
        """What a run does with it; ``other``: nothing, as with a safety checker or a second denoiser."""
        if self.name in ("transformer", "unet", "prior", "decoder"):
            return "denoiser"
        if "vae" in self.name or self.name == "vqgan":
            return "vae"
        return "encoder" if self.name.startswith(("text_encoder", "image_encoder")) else "other"


def model_of(options: Mapping[str, Any]) -> str:
    """The folder or repository that a run takes its model from: as named, or that of its flavour; empty: unknown."""
    named = str(options.get("pretrained_model_name_or_path") or "")
    flavours = flavours_of(str(options.get("model_family") or ""))
    return named or flavours.repository(str(options.get("model_flavour") or "")) or ""


def read_parts(weights: str, family: str) -> dict[str, ModelPart]:
    """Name -> part of the model that ``weights`` names: a folder, a repository, or nothing but its family."""
    folder = find_model(weights)
    places = sorted(path for path in folder.iterdir() if path.is_dir()) if folder is not None else ()
    parts = [_part(place, place.name) for place in places if not place.name.startswith(_NOT_MODELS)]
    found = {part.name: part for part in parts if part is not None}
    if any(part.kind == "denoiser" for part in found.values()):
        return found
    return {**published(weights, family), **found}


def named_denoiser(options: Mapping[str, Any]) -> ModelPart | None:
    """The denoiser that a configuration names apart from its pipeline; of no size where it is not here."""
    for kind in ("transformer", "unet"):
        named = str(options.get(f"pretrained_{kind}_model_name_or_path") or "")
        if not named:
            continue
        folder = find_model(named)
        below = str(options.get(f"pretrained_{kind}_subfolder") or kind)
        place = folder if folder is None or below.lower() == "none" else folder / below
        part = _part(place, kind) if place is not None else None
        return part or ModelPart(kind, 0, "assumed", None, f"{named} is not here")
    return None


def find_model(weights: str) -> Path | None:
    """The folder itself, or the newest snapshot of a repository in the hub's cache."""
    if not weights:
        return None
    if os.path.isdir(weights):
        return Path(weights)
    snapshots = sorted(
        hub_folder().glob(f"models--{weights.replace('/', '--')}/snapshots/*"),
        key=lambda path: path.stat().st_mtime,
    )
    return snapshots[-1] if snapshots else None


def _part(place: Path, name: str) -> ModelPart | None:
    config = read_whole(place / "config.json")
    parameters = _parameters(place)
    if parameters:
        return ModelPart(name, parameters, "measured", config, f"safetensors headers in {place}")
    return None if config is None else ModelPart(name, 0, "computed", config, "its weights are not here")


def _parameters(place: Path) -> int:
    """0 where one file has no header that can be read: a pointer to large storage, a download that stopped."""
    try:
        headers = [_header(file) for file in _weight_files(place)]
        return sum(prod(tensor["shape"]) for header in headers for tensor in header.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return 0


def _weight_files(place: Path) -> list[Path]:
    """Of one variant: repositories often hold the same weights twice."""
    files = sorted(place.glob("*.safetensors"))
    plain = [file for file in files if not any(f".{variant}" in file.name for variant in ("fp16", "bf16", "non_ema"))]
    return plain or files


def _header(file: Path) -> Mapping[str, Any]:
    """Of a safetensors file: name of a tensor -> dtype, shape, offsets."""
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError(f"{file}: a header of {length} bytes")
        found = json.loads(content.read(length))
        return {name: tensor for name, tensor in found.items() if name != "__metadata__"}


@cache
def _data(file: Path) -> Mapping[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def published_model(weights: str, family: str) -> tuple[Mapping[str, Any], bool] | None:
    """The model of this name and True; else one that is like it in nothing but its family, and False."""
    models: list[Mapping[str, Any]] = _data(PUBLISHED)["models"]
    wanted = weights.lower()
    named = next((model for model in models if wanted in map(str.lower, model["names"])), None)
    if named is not None:
        return named, True
    alike = next((model for model in models if model["family"] == plain(family)), None)
    return None if alike is None else (alike, False)


def plain(family: str) -> str:
    """Releases spell the same family differently."""
    return family.lower().replace("-", "_").removesuffix("_sigma")


def published(weights: str, family: str) -> dict[str, ModelPart]:
    """Of a model whose files are not here: its published configuration and sizes, or a guess by its family."""
    found = published_model(weights, family)
    if found is None:
        return {}
    entry, named = found
    sizes = _data(PUBLISHED)["components"]
    source: Source = "cited" if named else "assumed"
    note = f"published size of {entry['names'][0]}" + ("" if named else ", of the same family")
    note += f", {entry['stated']} billion by {entry['source']}" if "stated" in entry else ""
    parts = [
        ModelPart(entry["part"], entry["parameters"], source, entry["config"], note),
        *(ModelPart(name, sizes[size], source, None, note) for name, size in entry["components"].items()),
    ]
    return {part.name: part for part in parts}


def published_traces(weights: str, family: str, *, full: bool) -> tuple[int, int, dict[bool, Trace]] | None:
    """Pixels (times frames) of the sample, the model's parameters, and traces by whether blocks are checkpointed."""
    model, _named = published_model(weights, family) or ({"names": [""]}, False)
    entry = _data(PUBLISHED_TRACES)["models"].get(model["names"][0])
    if entry is None:
        return None
    traces = {name == "checkpointed": Trace.from_json(made) for name, made in entry["full" if full else "lora"].items()}
    return entry["area"], model["parameters"], traces
