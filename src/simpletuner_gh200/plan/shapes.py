"""Which shapes a run trains on, and how many bytes its data takes: from the dataset list and what lies on disk."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.datasets import Dataset
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.plan.rows import Source

_LATENT_FACTORS = {"sana": 32, "ltxvideo": 32, "ltxvideo2": 32, "sanavideo": 32, "deepfloyd": 1}
_TEMPORAL = {"ltxvideo": 8, "ltxvideo2": 8}
_VIDEO = (
    *("wan", "wan_s2v", "infinitetalk", "ltxvideo", "ltxvideo2", "hunyuanvideo"),
    *("kandinsky5_video", "longcat_video", "sanavideo"),
)
USUAL_FRAMES = 81
ALIGNMENT = 64
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".jxl", ".gif")
_MOVIES = (".mp4", ".mov", ".mkv", ".webm", ".avi")


@dataclass(frozen=True)
class Shape:
    """Of one sample, in pixels; ``frames`` 0: an image model."""

    height: int
    width: int
    frames: int = 0
    source: Source = "computed"

    @property
    def area(self) -> int:
        return self.height * self.width * max(1, self.frames)

    def latent(self, factor: int, temporal: int) -> tuple[int, ...]:
        """(frames,) height, width of its latent."""
        flat = (self.height // factor, self.width // factor)
        return ((self.frames - 1) // temporal + 1, *flat) if self.frames else flat


@dataclass(frozen=True)
class Data:
    """``samples`` of all training datasets; bytes of files held in memory and of cache files."""

    samples: int
    held: int
    """Files of in-memory datasets."""
    latents: int
    embeds: int
    cached: Source
    """Where the two before come from: measured on disk, or computed from shapes."""


def latent_factors(family: str, vae: Mapping[str, Any] | None) -> tuple[int, int]:
    """(spatial, temporal): the VAE's own, or the family's."""
    spatial = _LATENT_FACTORS.get(family, 8)
    if vae and isinstance(vae.get("block_out_channels"), list) and family not in _LATENT_FACTORS:
        spatial = 2 ** (len(vae["block_out_channels"]) - 1)
    return spatial, _TEMPORAL.get(family, 4)


def read_data(training: Training, *, latent_bytes: int, embed_bytes: int, patience: float | None = None) -> Data:
    """``latent_bytes`` and ``embed_bytes`` of one sample of the largest shape, for caches that are not there yet.

    ``patience``: seconds after which looking at files ends; what was found by then is a lower bound.
    """
    until = None if patience is None else time.monotonic() + patience
    trained = _trained(training)
    counts = [_survey(dataset, until) for dataset in trained]
    samples = sum(count for count, _size in counts)
    held = sum(size for dataset, (_count, size) in zip(trained, counts, strict=True) if dataset.in_memory)
    latents = sum(_below(dataset.path("cache_dir_vae"), until) for dataset in trained)
    embeds = sum(
        _below(dataset.path("cache_dir"), until) for dataset in training.enabled() if dataset.kind == "text_embeds"
    )
    return Data(
        samples=samples,
        held=held,
        latents=latents or samples * latent_bytes,
        embeds=embeds or samples * embed_bytes,
        cached="measured" if latents else "computed",
    )


def shapes_of(training: Training) -> dict[Shape, int]:
    """Every bucket that can come up -> its samples, 0 where no index tells; at least the square of ``resolution``."""
    family = str(training.values.get("model_family") or "")
    found = Counter[Shape]()
    for dataset in _trained(training):
        for shape, samples in _shapes(dataset, training.effective, family):
            found[shape] += samples
    return dict(found) or {_square(training.effective, family): 0}


def _trained(training: Training) -> list[Dataset]:
    return [dataset for dataset in training.enabled() if dataset.kind in ("image", "video")]


def _shapes(dataset: Dataset, values: Mapping[str, Any], family: str) -> Iterator[tuple[Shape, int]]:
    entry = {**{key: values[key] for key in ("resolution", "resolution_type")}, **dataset.entry}
    square = _edge(entry)
    frames = _frames(entry, family)
    ratios = _ratios(dataset)
    cropped = bool(entry.get("crop")) and str(entry.get("crop_aspect", "square")) == "square"
    if not ratios or cropped:
        yield Shape(square, square, frames, "computed" if cropped else "assumed"), sum(ratios.values())
        return
    by_pixels = str(entry.get("resolution_type") or "") == "pixel"
    step = _alignment(values, family)
    for ratio, samples in sorted(ratios.items()):
        yield _bucket(square, ratio, frames, by_pixels=by_pixels, step=step), samples


def _bucket(edge: int, ratio: float, frames: int, *, by_pixels: bool, step: int) -> Shape:
    """``by_pixels``: the shorter edge is fixed, else the area. ``step``: what edges are multiples of."""
    if by_pixels:
        height, width = (edge, edge * ratio) if ratio >= 1 else (edge / ratio, edge)
    else:
        height, width = edge / sqrt(ratio), edge * sqrt(ratio)
    return Shape(_aligned(height, step), _aligned(width, step), frames)


def _alignment(values: Mapping[str, Any], family: str) -> int:
    """Of Wan's edges SimpleTuner decides itself."""
    given = str(values.get("aspect_bucket_alignment") or "")
    return 32 if family == "wan" else int(given) if given.isdigit() and int(given) else ALIGNMENT


def _aligned(pixels: float, step: int = ALIGNMENT) -> int:
    return max(8, round(pixels / step) * step if pixels >= step else int(pixels))


def _square(values: Mapping[str, Any], family: str) -> Shape:
    edge = _edge(values)
    return Shape(edge, edge, _frames(values, family), "assumed")


def _edge(entry: Mapping[str, Any]) -> int:
    """Of the square bucket: SimpleTuner takes ``resolution`` in pixels, or in megapixels where it is an area."""
    value = entry.get("resolution")
    resolution = float(str(value)) if value not in (None, "") else 1024.0
    if str(entry.get("resolution_type") or "pixel_area") == "area" or resolution < 10:
        return _aligned(sqrt(resolution) * 1024)
    return int(resolution)


def _frames(entry: Mapping[str, Any], family: str) -> int:
    video = entry.get("video")
    asked = video.get("num_frames") if isinstance(video, Mapping) else None
    kind = entry.get("dataset_type")
    if family.replace("-", "_") in _VIDEO:  # 3.1 spells some with a hyphen
        return int(asked or USUAL_FRAMES) if kind in (None, "video") else 1
    return int(asked or USUAL_FRAMES) if kind == "video" else 0


def _ratios(dataset: Dataset) -> dict[float, int]:
    """Aspect ratio -> samples, in the bucket index that SimpleTuner left beside the data."""
    folder = dataset.local_folder
    if folder is None or not folder.is_dir():
        return {}
    found = Counter[float]()
    for file in folder.glob("aspect_ratio_bucket_indices_*.json"):
        try:
            buckets = json.loads(file.read_text(encoding="utf-8")).get("aspect_ratio_bucket_indices", {})
        except (OSError, ValueError, AttributeError):
            continue
        for key, members in buckets.items():
            if members:
                found[float(key.split("@")[0])] += len(members)
    return dict(found)


def _survey(dataset: Dataset, until: float | None) -> tuple[int, int]:
    """(images or films, bytes of all files) of a dataset on this machine."""
    count = size = 0
    for name, length in _files(dataset.local_folder, until):
        count += name.lower().endswith((*_IMAGES, *_MOVIES))
        size += length
    return count, size


def _files(folder: Path | None, until: float | None) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every file below ``folder``, as far as one gets by ``until``."""
    if folder is None or not folder.is_dir():
        return
    for place, _folders, names in os.walk(folder):
        for name in names:
            try:
                size = os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue  # a link that leads nowhere, or a file that went away just now
            yield name, size
            if until is not None and time.monotonic() > until:
                return


def _below(folder: Path | None, until: float | None) -> int:
    return sum(size for _name, size in _files(folder, until))
