"""What data and machine can't give a configuration, where SimpleTuner says so late, or not in its rules.

Only what is certain is a problem: the least that a run needs, against what is there.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from simpletuner_gh200.config.blocks import CacheSettings, RampSettings
from simpletuner_gh200.config.datasets import Dataset, is_true
from simpletuner_gh200.config.training import Training, unwritable
from simpletuner_gh200.errors import Problem
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.ramp.outlook import Sizes, ramp_from_settings, read_sizes
from simpletuner_gh200.units import counted, format_bytes, gib_to_bytes

OVERSUBSCRIPTION = "allow_dataset_oversubscription"
PIXELS_PER_LATENT = 64
"""Of a picture, for each of a latent's places; no family we know has fewer places."""
BYTES_PER_LATENT = 4 * 2
"""SDXL's, the fewest channels of a family that is trained today, in bf16."""


RANGES: dict[str, tuple[float, float]] = {
    "lora_rank": (1, math.inf),
    "vae_batch_size": (1, math.inf),
    "max_workers": (1, math.inf),
    "seed": (-1, 2**32 - 1),
    "lora_dropout": (0, 1),
}
"""Numbers beyond which SimpleTuner fails, or never ends, at a place where it has no rule that could be asked."""

DATASET_RANGES: dict[str, tuple[float, float]] = {"repeats": (0, math.inf), "probability": (0, math.inf)}
MEGAPIXELS, PIXELS = (0.0, 64.0), (16.0, math.inf)
"""What a resolution can be, by its type: the other's numbers fill memory, or leave nothing of a picture."""

PATHS = ("init_lora", "webhook_config", "deepspeed_config", "user_prompt_library")
"""Files that are named; some may be JSON instead."""


def infeasible(training: Training) -> Iterator[Problem]:
    for key, limits in RANGES.items():
        yield from _outside(key, training.values.get(key), *limits)
    for key in PATHS:
        text = str(training.values.get(key) or "").strip()
        if text.startswith(("/", "./", "../")) and not os.path.exists(text):
            yield Problem(key, f"{text!r}: no such file", "correct the path, or leave it out")
    for dataset in training.enabled():
        yield from _dataset(dataset)
    sizes, unreadable = read_sizes(training.effective, training.job.ranks)
    if not unreadable:
        yield from _without_length(training, sizes)
        yield from _too_few_samples(training, sizes)
    yield from _above_the_machine(training)
    yield from _too_little_disk(training)


def missing_checkpoint(training: Training) -> Iterator[Problem]:
    """One that is named is looked for by its last part in the output folder, wherever its path leads."""
    named, output = str(training.values.get("resume_from_checkpoint") or "latest"), training.values.get("output_dir")
    if named != "latest" and "://" not in named and output:
        place = Path(str(output), Path(named).name)
        if not place.is_dir():
            yield Problem(
                "resume_from_checkpoint", f"{named!r}: there is no {place}", "name one that is there, or 'latest'"
            )


def _outside(where: str, value: object, least: float, most: float) -> Iterator[Problem]:
    number = _number(value)
    if number is not None and not least <= number <= most:
        yield Problem(
            where, f"{value} is {'below' if number < least else 'above'} {least if number < least else most:g}"
        )


def _dataset(dataset: Dataset) -> Iterator[Problem]:
    entry, where = dataset.entry, dataset.where
    if not isinstance(entry.get("id", ""), str):
        yield Problem(f"{where}.id", "not a text", f'write "{entry["id"]}"')
    for key, limits in DATASET_RANGES.items():
        yield from _outside(f"{where}.{key}", entry.get(key), *limits)
    for key in ("cache_dir", "cache_dir_vae"):
        folder = dataset.path(key)
        if folder is not None and "{" not in str(folder):
            yield from unwritable(f"{where}.{key}", folder)
    if dataset.dealt:
        yield from _resolution(dataset)
        yield from _instance_prompt(dataset)


def _resolution(dataset: Dataset) -> Iterator[Problem]:
    given = {**dataset.run, **{key: value for key, value in dataset.entry.items() if value is not None}}
    value, kind = given.get("resolution"), given.get("resolution_type")
    if value is None or kind not in {"pixel", "area", "pixel_area"}:
        return
    where, number = f"{dataset.where}.resolution", _number(value)
    least, most = MEGAPIXELS if kind == "area" else PIXELS
    if number is None or number <= 0:
        yield Problem(where, f"{value!r} is not a number above 0")
    elif not least <= number < most:
        unit = "megapixels" if kind == "area" else "pixels"
        yield Problem(where, f"{value} {unit}, as resolution_type {kind!r} has it", "another resolution_type is meant")


def _instance_prompt(dataset: Dataset) -> Iterator[Problem]:
    given = {**dataset.run, **dataset.entry}
    asking = [key for key in ("only_instance_prompt", "prepend_instance_prompt") if is_true(given.get(key))]
    asking += ["caption_strategy"] if given.get("caption_strategy") == "instanceprompt" else []
    if asking and not given.get("instance_prompt"):
        what = f"{asking[0]} {given[asking[0]]!r} needs an instance_prompt, which is not set"
        yield Problem(f"{dataset.where}.{asking[0]}", what)


def _without_length(training: Training, sizes: Sizes) -> Iterator[Problem]:
    steps = _number(training.effective.get("max_train_steps"))
    if not steps and not sizes.by_epochs and not _ramps(training):  # the ramp's own words say it too
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
