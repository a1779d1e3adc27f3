"""What data and machine can't give a configuration, where SimpleTuner says so late, or not in its rules.

Only what is certain is a problem: the least that a run needs, against what is there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from simpletuner_gh200.config.blocks import CacheSettings, RampSettings
from simpletuner_gh200.config.datasets import Dataset
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import Problem
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.ramp.outlook import Sizes, ramp_from_settings, read_sizes
from simpletuner_gh200.units import counted, format_bytes, gib_to_bytes

OVERSUBSCRIPTION = "allow_dataset_oversubscription"
PIXELS_PER_LATENT = 64
"""Of a picture, for each of a latent's places; no family we know has fewer places."""
BYTES_PER_LATENT = 4 * 2
"""SDXL's, the fewest channels of a family that is trained today, in bf16."""


LEAST = {"lora_rank": 1, "vae_batch_size": 1, "seed": -1}
"""Numbers below which SimpleTuner fails, or never ends, at a place where it has no rule that could be asked."""


def infeasible(training: Training) -> Iterator[Problem]:
    for key, least in LEAST.items():
        value = _number(training.values.get(key))
        if value is not None and value < least:
            yield Problem(key, f"{value:g} is below {least}", "leave it out for SimpleTuner's default")
    sizes, unreadable = read_sizes(training.effective, training.job.ranks)
    if not unreadable:
        yield from _without_length(training, sizes)
        yield from _too_few_samples(training, sizes)
    yield from _above_the_machine(training)
    yield from _too_little_disk(training)


def _without_length(training: Training, sizes: Sizes) -> Iterator[Problem]:
    if not sizes.max_train_steps and not sizes.by_epochs and not _ramps(training):  # the ramp's own words say it too
        yield Problem("max_train_steps", "0, and so is num_train_epochs", "set one of the two")


def _ramps(training: Training) -> RampSettings | None:
    ramp = training.settings.part(RampSettings) if training.settings is not None else None
    return ramp if ramp is not None and ramp.enable_batch_size_rampup else None


def _too_few_samples(training: Training, sizes: Sizes) -> Iterator[Problem]:
    """SimpleTuner stops where a bucket has fewer samples than one effective batch, and no bucket has more than all."""
    ramp = _ramps(training)
    for dataset in training.enabled():
        samples = _dealt_samples(dataset)
        if not samples:
            continue
        batch = _whole(dataset.entry.get("train_batch_size"), sizes.train_batch_size)
        effective = batch * sizes.world_size * max(1, sizes.gradient_accumulation_steps)
        if ramp is not None:
            effective = max(effective, ramp_from_settings(ramp, sizes).target)
        repeats = _whole(dataset.entry.get("repeats"), 0)
        padded = str(training.effective.get(OVERSUBSCRIPTION)).lower() in {"true", "1"} and not repeats
        if samples * (repeats + 1) < effective and not padded:
            times = f" x {repeats + 1}" if repeats else ""
            remedy = f"a smaller batch, repeats of at least {-(-effective // samples) - 1}"
            remedy += "" if repeats else f", or {OVERSUBSCRIPTION}: true"
            yield Problem(
                dataset.where,
                f"{counted(samples, 'sample')}{times}, and an effective batch of {effective}: zero usable batches",
                remedy,
            )


def _dealt_samples(dataset: Dataset) -> int:
    """Images and videos to train on, where a look at names tells; 0 where it does not."""
    found = dataset.survey
    return found.samples if found is not None and dataset.kind in {"image", "video"} and not found.others else 0


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _whole(value: object, default: int) -> int:
    text = str(value).strip()
    return int(text) if text.isdigit() and value is not None else default


def _above_the_machine(training: Training) -> Iterator[Problem]:
    """Ceilings that this machine could never fill are those of another one, or mistyped."""
    total = host_memory().total
    asked = [(f"dataset {name!r}.in_memory", block.memory_limit_gb) for name, _folder, block in training.in_memory()]
    if training.settings is not None:
        asked.append(("cache_config", training.settings.part(CacheSettings).memory_limit_gb))
    for where, limit in asked:
        if limit is not None and gib_to_bytes(limit) > total:
            yield Problem(
                f"{where}.memory_limit_gb",
                f"{limit:g} GiB, and this machine has {format_bytes(total)}",
                "lower it, or leave it out: then what is free decides",
            )


def _too_little_disk(training: Training) -> Iterator[Problem]:
    """The latents alone, of pictures that are not cached yet, beside what is free where they go."""
    wanted: dict[int, tuple[int, Path, list[str]]] = {}
    for dataset in training.enabled():
        samples, folder = _dealt_samples(dataset), dataset.path("cache_dir_vae")
        if not samples or folder is None or "{" in str(folder) or folder.is_dir() or dataset.kind != "image":
            continue
        size = samples * _latent_bytes(dataset)
        existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        device = os.stat(existing).st_dev
        before, _place, names = wanted.get(device, (0, existing, []))
        wanted[device] = (before + size, existing, [*names, dataset.id])
    for size, place, names in wanted.values():
        free = shutil.disk_usage(place).free
        if size > free:
            what = f"the latents of {', '.join(map(repr, names))} take at least {format_bytes(size)}"
            yield Problem("cache_dir_vae", f"{what}, and {place} has {format_bytes(free)} free", "name another disk")


def _latent_bytes(dataset: Dataset) -> int:
    """At least: pictures are scaled to the dataset's resolution, pixels of an edge or megapixels."""
    given = {**dataset.run, **dataset.entry}
    try:
        resolution = float(given.get("resolution") or 0)
    except (TypeError, ValueError):
        return 0
    pixels = resolution * 1e6 if given.get("resolution_type") == "area" else resolution * resolution
    return int(pixels / PIXELS_PER_LATENT * BYTES_PER_LATENT)
