"""Which caches this run has, read from SimpleTuner's own state after its datasets were made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.held.caches import Wanted
from simpletuner_gh200.seams.features.caches.makers import made_by

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
