"""Its factory, taken through each dataset up to where texts and pictures would be encoded; nothing is written."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.datasets import IMAGES
from simpletuner_gh200.seams.rules.judging import Enough, Nothing, Refusal, judged, named

TRAINED = frozenset({"image", "video", "audio", "caption"})

LOOKED_AT = 200
"""Pictures of a dataset at most. Of one that has no more than these, SimpleTuner's buckets are known exactly."""

PICTURES = frozenset({"image", "conditioning"})
SORT = "_process_for_bucket"
"""Its scan's method that puts one picture into a bucket."""

LIMITS = ("minimum_image_size", "minimum_aspect_ratio", "maximum_aspect_ratio")

PRIMARY = frozenset({"image", "video", "audio", "conditioning", "eval", "caption"})
"""Kinds of datasets that hold samples; the others hold what is made of them."""

BEFORE = (
    "_prevalidate_backend_ids",
    "_ensure_text_embed_backends_present",
    "_evaluate_distiller_requirements",
    "configure_text_embed_backends",
    "configure_image_embed_backends",
)
AFTER = (
    "_connect_conditioning_datasets",
    "_connect_s2v_datasets",
    "_validate_audio_only_datasets",
    "_validate_edit_model_conditioning_type",
)
"""Its factory's questions about the list as a whole, before and after each dataset; older releases have fewer."""


def of_datasets(trainer: Any) -> Iterator[Refusal]:
    module = importlib.import_module("simpletuner.helpers.data_backend.factory")
    factory = module.FactoryRegistry(trainer.config, trainer.accelerator, [], [], trainer.model)
    try:
        entries = factory.load_configuration()
    except Exception as refused:  # noqa: BLE001 - its words are the answer
        yield from named("", refused)
        return
    _write_nothing(module, factory)
    yield from _of_all(factory, BEFORE, entries)
    enabled = [entry for entry in entries if not entry.get("disabled") and not entry.get("disable")]
    if not any(map(_trained, enabled)):
        yield {"where": "data_backend_config", "what": "no dataset to train on: none of images, videos or audio is on"}
    primary = [(f"dataset {entry.get('id')!r}", entry) for entry in enabled if _kind(entry) in PRIMARY]
    for where, entry in primary:
        yield from judged(where, module.init_backend_config, copy.deepcopy(entry), trainer.config, trainer.accelerator)
        yield from judged(where, _validated, module, copy.deepcopy(entry), vars(trainer.config))
    if not factory.text_embed_backends:  # judged above, or made of something that this process has not
        return
    for where, entry in primary:
        configure = factory._configure_single_data_backend
        yield from judged(where, configure, copy.deepcopy(entry), entries, [], [], False)
    yield from _of_all(factory, AFTER, entries)


def _of_all(factory: Any, names: tuple[str, ...], entries: list[dict[str, Any]]) -> Iterator[Refusal]:
    for judge in filter(None, (getattr(factory, name, None) for name in names)):
        yield from judged("", judge, copy.deepcopy(entries))


def _validated(module: Any, entry: dict[str, Any], arguments: dict[str, Any]) -> None:
    module.create_backend_config(entry, arguments).validate(arguments)


def _kind(entry: Mapping[str, Any]) -> str:
    return str(entry.get("dataset_type") or "image")


def _trained(entry: Mapping[str, Any]) -> bool:
    """Is it dealt to the training loop, now or later?"""
    return _kind(entry) in TRAINED and entry.get("probability", 1) != 0


def _write_nothing(module: Any, factory: Any) -> None:
    """In this process, which only asks: no folder is made, no index removed or written, no embed computed."""
    nothing = Nothing()
    module.TextEmbeddingCache = module.ImageEmbedCache = module.DistillationCache = nothing
    module.StateTracker.delete_cache_files = staticmethod(nothing)
    for name in ("get_vae", "load_vae", "load_text_encoder", "get_pipeline", "load_model"):
        setattr(factory.model, name, nothing)
    os.makedirs = nothing  # type: ignore[assignment]
    Path.mkdir = nothing  # type: ignore[assignment, method-assign]
    bucketed = factory._handle_bucket_operations

    def files_come_now(backend: Any, init_backend: Any, *more: Any, **named: Any) -> None:
        metadata = init_backend["metadata_backend"]
        if _kind(backend) not in PICTURES or backend.get("type") != "local" or not hasattr(metadata, SORT):
            raise Enough
        _sort(_pictures(init_backend["instance_data_dir"]), metadata)
        bucketed(backend, init_backend, *more, **named)

    def texts_come_now(_backend: Any, init_backend: Any, *_more: Any, **_named: Any) -> None:
        factory.data_backends[init_backend["id"]] = init_backend
        raise Enough

    factory._handle_bucket_operations = files_come_now
    factory._process_text_embeddings = texts_come_now


def _sort(pictures: list[Path], metadata: Any) -> None:
    """Into its buckets, as it would, or as its index on disk has them.

    Of a large dataset some pictures stand for all: then whether a bucket fills a batch is not known.
    """
    nothing = Nothing()
    for name in ("refresh_buckets", "reload_cache", "save_cache"):
        setattr(metadata, name, nothing)
    metadata.delete_unwanted_images = False
    looked_at = pictures[:: -(-len(pictures) // LOOKED_AT) or 1]
    sizes = [size for size in map(_size, looked_at) if size]
    if pictures and not sizes:
        raise ValueError(f"none of its pictures can be opened, {pictures[0]} for one")
    buckets = metadata.aspect_ratio_bucket_indices
    if sum(map(len, buckets.values())) != len(pictures):
        buckets = {}
        for path in looked_at:
            getattr(metadata, SORT)(str(path), buckets)
        metadata.aspect_ratio_bucket_indices = buckets
        if len(looked_at) < len(pictures):
            metadata._prune_small_buckets = metadata.split_buckets_between_processes = nothing
    for name in ("_enforce_min_bucket_size", "_enforce_min_aspect_ratio", "_enforce_max_aspect_ratio"):
        getattr(metadata, name, nothing)()
    if sizes and not any(metadata.aspect_ratio_bucket_indices.values()):
        limits = ", ".join(f"{name} {getattr(metadata, name):g}" for name in LIMITS if getattr(metadata, name, None))
        wide, high = max(sizes)
        raise ValueError(f"no picture is left by {limits}: the largest has {wide} x {high} pixels")


def _pictures(folder: object) -> list[Path]:
    return sorted(path for path in Path(str(folder)).rglob("*") if path.suffix.lower() in IMAGES)


def _size(path: Path) -> tuple[int, int] | None:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            wide, high = picture.size
            return wide, high
    except Exception:  # noqa: BLE001 - SimpleTuner passes over it, whatever is wrong
        return None
