"""Which caches this run has, read from SimpleTuner's own state after its datasets were made, and what made them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.held.caches import Wanted

FILE_BACKENDS = ("local", "memory")
"""Backends whose cache files can be looked at for changes."""


@dataclass
class FoundCache:
    """One of SimpleTuner's caches, with the backend that reads and writes its files."""

    cache: Any
    backend: Any
    wanted: Wanted
    latents_of: list[str] = field(default_factory=list)
    """Datasets whose latents are in it."""


def find_caches(served: Mapping[str, bool]) -> list[FoundCache]:
    """The caches that are to be served, in an order that all ranks share; FeatureUnavailable where one can't be."""
    from simpletuner.helpers.training.state_tracker import StateTracker

    found: dict[tuple[int, str], FoundCache] = {}
    for dataset, kind, cache, backend in _all(StateTracker):
        if not served[kind]:
            continue
        folder = os.path.abspath(cache.cache_dir)
        where = getattr(backend, "type", FILE_BACKENDS[0])
        if where not in FILE_BACKENDS:
            raise FeatureUnavailable(
                f"the {kind} cache of dataset {dataset!r} is on a backend of type {where!r}, whose files can't be "
                f"looked at for changes",
                remedy=f"keep that cache on a local backend, or set its cache type to 'standard' (accepted backends: "
                f"{', '.join(FILE_BACKENDS)})",
            )
        origin = made_by(kind, StateTracker.get_args(), StateTracker.data_backends.get(dataset, {}).get("config") or {})
        wanted = _wanted(dataset, kind, folder, cache, origin)
        known = found.setdefault((id(cache), folder), FoundCache(cache, backend, wanted))
        if kind in ("vae", "audio"):
            known.latents_of.append(dataset)
    return _one_per_folder(sorted(found.values(), key=lambda item: (item.wanted.name, item.wanted.folder)))


def _all(tracker: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """(dataset, kind, cache, backend), the same cache possibly several times."""
    for dataset, entry in sorted(dict(tracker.data_backends).items()):
        vae = entry.get("vaecache")
        if vae is not None:
            kind = "audio" if getattr(vae, "dataset_type", None) == "audio" else "vae"
            yield dataset, kind, vae, vae.cache_data_backend
        for key, kind in (("text_embed_cache", "text"), ("distillation_cache", "distillation")):
            cache = entry.get(key)
            if cache is not None and hasattr(cache, "data_backend"):
                yield str(getattr(cache, "id", dataset)), kind, cache, cache.data_backend
        embeds = entry.get("conditioning_image_embed_cache")
        if embeds is not None:
            yield dataset, "image_embed", embeds, embeds.cache_data_backend
    # Newer releases only; such a cache reads and writes its files itself.
    for dataset, cache in sorted(getattr(tracker, "_grounding_image_embed_caches", {}).items()):
        yield dataset, "image_embed", cache, cache
    default = tracker.get_default_text_embed_cache()
    if default is not None:
        yield default.id, "text", default, default.data_backend


def _wanted(dataset: str, kind: str, folder: str, cache: Any, origin: str) -> Wanted:
    maps = (getattr(cache, name, None) or () for name in ("image_path_to_vae_path", "image_path_to_embed_path"))
    expected, look = max(map(len, maps)), kind in ("vae", "audio")
    return Wanted(f"{kind}-{dataset}", kind, folder, expected, look_for_nan=look, made_by=origin)


def _one_per_folder(found: list[FoundCache]) -> list[FoundCache]:
    """Two caches on one folder are one of ours: a file has one entry, whoever asks for it. Names are made unique."""
    tables: dict[str, Wanted] = {}
    taken: set[str] = set()
    for item in found:
        if item.wanted.folder not in tables:
            name, count = item.wanted.name, 1
            while name in taken:
                count += 1
                name = f"{item.wanted.name}-{count}"
            taken.add(name)
            tables[item.wanted.folder] = replace(item.wanted, name=name)
        item.wanted = tables[item.wanted.folder]
    return found


# -- what made their entries -----------------------------------------------------------------------------------------

# Packs carry this, and a run with another one does not take them. So only keys that change the cached values belong
# here: any other would throw packs away that are as good as new.
_MODEL = r"model_family|model_flavour|pretrained_model_name_or_path|revision|variant|mixed_precision"
_VAE = r"pretrained_vae_.*|vae_dtype"
_ENCODERS = (
    r".*(text_encoder|image_encoder|t5|gemma|grounding).*(path|subfolder|precision|revision)|tokenizer_max_length"
)
_NETWORK = r"pretrained_(transformer|unet)_.*|base_model_precision|controlnet_model_name_or_path"

ARGUMENTS = {
    "vae": f"{_MODEL}|{_VAE}",
    "audio": f"{_MODEL}|{_VAE}",
    "text": f"{_MODEL}|{_ENCODERS}",
    "image_embed": f"{_MODEL}|{_ENCODERS}|{_VAE}",
    "distillation": f"{_MODEL}|{_VAE}|{_ENCODERS}|{_NETWORK}",
}
"""By kind of cache: the arguments, as a pattern, since families bring encoders of their own."""

SAMPLES = (
    r"resolution|resolution_type|pixel_resolution|crop|crop_.*|aspect_bucket_(rounding|alignment)|"
    r"maximum_image_size|target_downsample_size|video|audio|conditioning_type"
)
"""Keys of the dataset and arguments that decide what goes into the encoder."""


def made_by(kind: str, arguments: Any, dataset: Mapping[str, Any]) -> str:
    """One line of JSON, the same for the same values. ``dataset``: as configured; text has no samples."""
    asked = vars(arguments) if arguments is not None else {}
    values = {key: asked[key] for key in _matching(ARGUMENTS[kind], frozenset(asked))}
    if kind != "text":
        values |= {key: asked[key] for key in _matching(SAMPLES, frozenset(asked))}
        values |= {f"dataset.{key}": dataset[key] for key in _matching(SAMPLES, frozenset(dataset))}
    given = {key: value for key, value in values.items() if value is not None}
    return json.dumps(given, sort_keys=True, separators=(",", ":"), default=str)


@lru_cache(maxsize=32)
def _matching(pattern: str, keys: frozenset[str]) -> tuple[str, ...]:
    """Those of a run's hundreds of arguments that the pattern names: every cache of a run asks the same."""
    wanted = re.compile(pattern)
    return tuple(key for key in keys if wanted.fullmatch(key))
