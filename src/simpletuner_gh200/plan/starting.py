"""What a first start takes before its first step: reading models, looking through pictures, encoding them and their
captions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.config.blocks import MOST_WORKERS
from simpletuner_gh200.config.datasets import IMAGES
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.memory.host import usable_cores
from simpletuner_gh200.plan.data import shapes_of
from simpletuner_gh200.plan.facts import ELEMENT
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.sizes import ModelSizes

SCAN_SECONDS = 0.0015
"""For each picture, of which SimpleTuner 4 reads the header; ``gh200 bench caching`` measures it."""

STOCK_SECONDS = 0.016
PARALLEL_SECONDS = 0.0045
"""For each megapixel on one core, prepared by SimpleTuner, which uses one, and by a worker; ``gh200 bench caching``."""

VAE_SECONDS = 0.04
"""For each megapixel that the VAE is given, on a GPU: assumed, 20 to 60 ms are usual."""

CAPTION_SECONDS = 0.02
"""For each caption, by its text encoder on a GPU: assumed."""

LOOKED_AT = 16
"""Pictures of each data set whose size is read."""


@dataclass(frozen=True)
class Pictures:
    samples: int
    megapixels: float
    """Of all of them together."""


def pictures_of(training: Training) -> Pictures:
    folders = list(_folders(training))
    return Pictures(sum(len(_pictures(folder)) for folder in folders), float(sum(map(_megapixels, folders))))


def start_seconds(training: Training, given: Pictures, sizes: ModelSizes, machine: Machine) -> dict[str, float]:
    """``scan``, ``pictures``, ``captions`` for empty caches, and ``models``, read from the disk; on one node."""
    goal = max(shape.area for shape in shapes_of(training)) / 1e6
    parallel = training.settings is not None and training.settings.caching_in_parallel
    cores = usable_cores() if machine.name == "this" else MOST_WORKERS * machine.devices
    vae = given.samples * goal * VAE_SECONDS
    prepared = given.megapixels * (PARALLEL_SECONDS / min(cores, MOST_WORKERS) if parallel else STOCK_SECONDS)
    parts = [sizes.denoiser, *sizes.encoders, *([sizes.vae] if sizes.vae is not None else [])]
    return {
        "scan": given.samples * SCAN_SECONDS,
        "pictures": max(vae, prepared) if parallel else vae + prepared,
        "captions": given.samples * CAPTION_SECONDS,
        "models": sum(part.parameters for part in parts) * ELEMENT["bf16"] / machine.disk_rate,
    }


def _folders(training: Training) -> Iterator[Path]:
    for dataset in training.enabled():
        if dataset.kind == "image" and dataset.local_folder is not None and dataset.local_folder.is_dir():
            yield dataset.local_folder


def _pictures(folder: Path) -> list[str]:
    found = []
    for place, _inside, names in os.walk(folder):
        found += [os.path.join(place, name) for name in names if os.path.splitext(name)[1].lower() in IMAGES]
    return found


def _megapixels(folder: Path) -> float:
    """Of all of its pictures, by the sizes of some."""
    from PIL import Image, UnidentifiedImageError

    paths = _pictures(folder)
    sizes = []
    for path in paths[:: max(1, len(paths) // LOOKED_AT)]:
        with suppress(OSError, UnidentifiedImageError, Image.DecompressionBombError), Image.open(path) as picture:
            sizes.append(picture.width * picture.height / 1e6)
    return len(paths) * sum(sizes) / len(sizes) if sizes else 0.0
