"""Which shapes a run trains on, and how many bytes its data takes: from the dataset list and what lies on disk."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.datasets import IMAGES, VIDEOS, Dataset
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.plan.facts import Source
from simpletuner_gh200.telemetry.sink import read_whole

_LATENT_FACTORS = {"sana": 32, "ltxvideo": 32, "ltxvideo2": 32, "sanavideo": 32, "deepfloyd": 1}
_TEMPORAL = {"ltxvideo": 8, "ltxvideo2": 8}
_VIDEO = (
    *("wan", "wan_s2v", "infinitetalk", "ltxvideo", "ltxvideo2", "hunyuanvideo"),
    *("kandinsky5_video", "longcat_video", "sanavideo"),
)
USUAL_FRAMES = 81
ALIGNMENT = 64


@dataclass(frozen=True)
class SampleShape:
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

    def latent_bytes(self, factor: int, temporal: int, channels: int) -> int:
        """As it is cached, in float32."""
        return prod(self.latent(factor, temporal)) * channels * 4


@dataclass(frozen=True)
class Data:
    """Bytes of files held in memory and of cache files."""

    held: int
    """Files of in-memory datasets."""
    latents: int
    embeds: int
    cached: Source
    """Where the two before come from: measured on disk, or computed from shapes."""
    samples: int = 0
    """Files that are images or videos, each once; 0 where nobody counted."""


def latent_factors(family: str, vae: Mapping[str, Any] | None) -> tuple[int, int]:
    """(spatial, temporal): the VAE's own, or the family's."""
    spatial = _LATENT_FACTORS.get(family, 8)
    if vae and isinstance(vae.get("block_out_channels"), list) and family not in _LATENT_FACTORS:
        spatial = 2 ** (len(vae["block_out_channels"]) - 1)
    return spatial, _TEMPORAL.get(family, 4)


# -- bytes on disk -----------------------------------------------------------------------------------------


def read_data(training: Training, *, latent_bytes: int, embed_bytes: int, patience: float | None = None) -> Data:
    """``latent_bytes`` and ``embed_bytes`` of one sample of the largest shape, for caches that are not there yet.

    ``patience``: seconds after which looking at files ends; what was found by then is a lower bound.
    """
    until = None if patience is None else time.monotonic() + patience
    samples = held = latents = 0
    for dataset in _trained(training):
        for name, size in _files(dataset.local_folder, until):
            samples += os.path.splitext(name)[1].lower() in IMAGES | VIDEOS
            held += size * dataset.in_memory
        latents += _bytes_below(dataset.path("cache_dir_vae"), until)
    texts = (dataset for dataset in training.enabled() if dataset.kind == "text_embeds")
    embeds = sum(_bytes_below(dataset.path("cache_dir"), until) for dataset in texts)
    return Data(
        held=held,
        latents=latents or samples * latent_bytes,
        embeds=embeds or samples * embed_bytes,
        cached="measured" if latents else "computed",
        samples=samples,
    )


def folders_elsewhere(training: Training) -> list[str]:
    """Notes on data sets whose files are not on this machine: a plan counts nothing of them."""
    folders = ((dataset.where, dataset.local_folder) for dataset in _trained(training))
    return [
        f"{where}: {str(folder)!r} is not here: its bytes, caches and first start are not counted "
        "(plan where it is, or ask gh200 plan --pictures N --pixels M how long a first start takes)"
        for where, folder in folders
        if folder is not None and not folder.is_dir()
    ]


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


def _bytes_below(folder: Path | None, until: float | None) -> int:
    return sum(size for _name, size in _files(folder, until))


# -- shapes ------------------------------------------------------------------------------------------------


def shapes_of(training: Training) -> dict[SampleShape, int]:
    """Every bucket that can come up -> its samples, 0 where no index tells; at least the square of ``resolution``."""
    values = training.effective
    found = Counter[SampleShape]()
    for dataset in _trained(training):
        for shape, samples in _shapes(dataset, values):
            found[shape] += samples
    return dict(found) or {_square(values, values, "assumed"): 0}


def _trained(training: Training) -> list[Dataset]:
    return [dataset for dataset in training.enabled() if dataset.kind in ("image", "video")]


def _shapes(dataset: Dataset, values: Mapping[str, Any]) -> Iterator[tuple[SampleShape, int]]:
    entry = {**{key: values[key] for key in ("resolution", "resolution_type")}, **dataset.entry}
    ratios = _ratios(dataset)
    cropped = bool(entry.get("crop")) and str(entry.get("crop_aspect", "square")) == "square"
    square = _square(entry, values, "computed" if cropped else "assumed")
    if not ratios or cropped:
        yield square, sum(ratios.values())
        return
    edge, step = square.height, _alignment(values)
    for ratio, samples in sorted(ratios.items()):
        if str(entry.get("resolution_type") or "") == "pixel":  # the shorter edge is fixed, else the area
            height, width = (edge, edge * ratio) if ratio >= 1 else (edge / ratio, edge)
        else:
            height, width = edge / sqrt(ratio), edge * sqrt(ratio)
        yield SampleShape(_aligned(height, step), _aligned(width, step), square.frames), samples


def _square(entry: Mapping[str, Any], values: Mapping[str, Any], source: Source) -> SampleShape:
    """SimpleTuner takes ``resolution`` in pixels, or in megapixels where it is an area."""
    resolution = float(str(entry["resolution"]))
    in_megapixels = str(entry.get("resolution_type")) == "area" or resolution < 10
    edge = _aligned(sqrt(resolution) * 1024) if in_megapixels else int(resolution)
    return SampleShape(edge, edge, _frames(entry, _family(values)), source)


def _frames(entry: Mapping[str, Any], family: str) -> int:
    video = entry.get("video")
    given = int((video.get("num_frames") if isinstance(video, Mapping) else None) or USUAL_FRAMES)
    kind = entry.get("dataset_type")
    if family in _VIDEO:
        return given if kind in (None, "video") else 1
    return given if kind == "video" else 0


def _alignment(values: Mapping[str, Any]) -> int:
    """What edges are multiples of; of Wan's SimpleTuner decides itself."""
    given = str(values.get("aspect_bucket_alignment") or "")
    return 32 if _family(values) == "wan" else int(given) if given.isdigit() and int(given) else ALIGNMENT


def _family(values: Mapping[str, Any]) -> str:
    """3.1 spells some with a hyphen."""
    return str(values.get("model_family") or "").replace("-", "_")


def _aligned(pixels: float, step: int = ALIGNMENT) -> int:
    return max(8, round(pixels / step) * step if pixels >= step else int(pixels))


def _ratios(dataset: Dataset) -> dict[float, int]:
    """Aspect ratio -> samples, in the bucket index that SimpleTuner left with the data."""
    found = Counter[float]()
    folder = dataset.local_folder
    for file in folder.glob("aspect_ratio_bucket_indices_*.json") if folder is not None else ():
        for key, members in (read_whole(file) or {}).get("aspect_ratio_bucket_indices", {}).items():
            if members:
                found[float(key.split("@")[0])] += len(members)
    return dict(found)
