"""An entry of SimpleTuner's dataset list, and every rule about it: the only place where one is written.

Defaults, spellings and paths are taken as SimpleTuner takes them, so that what is checked before a run is what the
run will use: a path is stripped of blanks, ``{model_family}`` is filled in, and ``~`` and ``$HOME`` stay as they are.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.config.part import DATASET_BLOCK
from simpletuner_gh200.config.settings import resolve_dataset
from simpletuner_gh200.errors import ConfigError, Problem
from simpletuner_gh200.units import counted

IN_MEMORY = "in_memory"
"""The type of an entry whose files we hold."""

_ON_THIS_MACHINE = {"local", IN_MEMORY}
_HOLD_CACHES = {"text_embeds", "image_embeds", "conditioning_image_embeds", "distillation_cache"}
_DEALT = {"image", "video", "conditioning", "eval"}
_CAPTIONED = {"image", "video"}
_PLACE = "name the folder that holds them"


# -- what lies in a folder: one quick look at names, and at sizes where they are asked for ----------------------------

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".jxl", ".gif"})
VIDEOS = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v"})
CAPTION = ".txt"
_BESIDE = frozenset({CAPTION, ".json", ".jsonl", ".csv", ".parquet", ".md"})
"""What lies beside samples and is none itself."""

SKIPPED_FOLDERS = frozenset(
    {".Spotlight-V100", ".Trashes", ".fseventsd", ".TemporaryItems", ".zfs", ".ipynb_checkpoints"}
)
"""Folders of systems and tools, into which SimpleTuner does not look."""

_SHOWN = 3
_LOOKED_AT = 200
"""Images, spread over all of them, whose size is read."""


@dataclass(frozen=True)
class Survey:
    """Counts. An image or video has a caption where a ``.txt`` of its name lies beside it, as SimpleTuner looks."""

    files: int = 0
    samples: int = 0
    """Images and videos, told by their endings."""
    captioned: int = 0
    others: int = 0
    """Files that are neither samples nor what lies beside them: perhaps samples of a kind we don't know."""
    bytes: int = 0
    """Of all files; 0 where it was not asked for."""
    without_caption: tuple[str, ...] = ()
    """The first few, below the folder."""
    edges: tuple[int, ...] = ()
    """What ``shorter_edges`` found, where that was asked."""


def survey(folder: Path, *, sizes: bool = False) -> Survey:
    """Look through ``folder`` and all below it, following links as SimpleTuner does."""
    files = samples = captioned = others = total = 0
    first: list[str] = []
    for place, names in _folders(folder):
        there = set(names)
        files += len(names)
        for name in names:
            stem, ending = os.path.splitext(name)
            if ending.lower() in IMAGES or ending.lower() in VIDEOS:
                samples += 1
                if stem + CAPTION in there:
                    captioned += 1
                elif len(first) < _SHOWN:
                    first.append(os.path.relpath(os.path.join(place, name), folder))
            elif ending.lower() not in _BESIDE:
                others += 1
        if sizes:
            total += sum(_size(os.path.join(place, name)) for name in names)
    return Survey(files, samples, captioned, others, total, tuple(first))


def shorter_edges(folder: Path) -> tuple[int, ...]:
    """Of some images, spread over all that are below ``folder``: their shorter edges in pixels, in order."""
    from PIL import Image

    paths = [os.path.join(place, name) for place, names in _folders(folder) for name in names]
    images = [path for path in paths if os.path.splitext(path)[1].lower() in IMAGES]
    found = []
    for path in images[:: max(1, -(-len(images) // _LOOKED_AT))]:
        with suppress(OSError, ValueError, Image.DecompressionBombError), Image.open(path) as image:
            found.append(min(image.size))
    return tuple(sorted(found))


def _folders(top: Path) -> Iterator[tuple[str, list[str]]]:
    """(folder, names of its files), each real folder once."""
    seen: set[tuple[int, int]] = set()
    for place, inside, names in os.walk(top, followlinks=True):
        state = os.stat(place)
        if (state.st_dev, state.st_ino) in seen:
            inside.clear()
            continue
        seen.add((state.st_dev, state.st_ino))
        inside[:] = sorted(set(inside) - SKIPPED_FOLDERS)
        yield place, sorted(names)


def _size(path: str) -> int:
    """A link that leads nowhere has none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


# -- an entry ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """One entry, read by the rules."""

    entry: Mapping[str, Any]
    model_family: str | None = None
    """What ``{model_family}`` in a path stands for; in a rank SimpleTuner has filled it in already."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The training configuration, for what an entry leaves to it."""

    @property
    def id(self) -> str:
        return str(self.entry.get("id"))

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"dataset {self.entry.get('id')!r}"

    @property
    def enabled(self) -> bool:
        return not self.entry.get("disabled") and not self.entry.get("disable")

    @property
    def type(self) -> str:
        """Where its files are: ``local``, ``in_memory``, ``aws`` and so on."""
        return str(self.entry.get("type", "local"))

    @property
    def kind(self) -> str:
        """What its files are: ``image``, ``video``, ``text_embeds`` and so on."""
        named = self.entry.get("dataset_type")
        return "image" if named is None else str(named).strip().lower()

    @property
    def in_memory(self) -> bool:
        return self.type == IN_MEMORY

    @property
    def dealt(self) -> bool:
        """Does SimpleTuner deal its samples to the ranks? Of any other kind, every rank may read everything."""
        return self.kind in _DEALT

    @property
    def folder(self) -> Path | None:
        """``instance_data_dir`` as SimpleTuner takes it."""
        return self.path("instance_data_dir", "instance_data_root")

    @property
    def held_folder(self) -> Path | None:
        """What ``in_memory`` holds: the data, or for an entry that has none its cache."""
        return self.folder or self.path("cache_dir")

    @property
    def local_folder(self) -> Path | None:
        """The folder of this machine that it reads; None where there is none, or only the run will know its name."""
        if self.type not in _ON_THIS_MACHINE or self.kind in _HOLD_CACHES:
            return None
        return self.folder if self.folder is not None and "{" not in str(self.folder) else None

    @cached_property
    def survey(self) -> Survey | None:
        """What lies in the folder; None where there is none, or where its index has been made elsewhere."""
        folder = self.local_folder
        return survey(folder) if folder is not None and folder.is_dir() and not self._listed_before else None

    def path(self, *keys: str) -> Path | None:
        """The path under the first of ``keys`` that the entry has."""
        value = next((self.entry[key] for key in keys if key in self.entry), None)
        text = str(value).strip() if value is not None else ""
        if self.model_family is not None:
            text = text.replace("{model_family}", self.model_family)
        return Path(text) if text else None

    def as_local(self) -> dict[str, Any]:
        """The entry as SimpleTuner is to see it: files of this machine, and nothing of ours."""
        return {key: value for key, value in self.entry.items() if key != DATASET_BLOCK} | {"type": "local"}

    def settings(self) -> InMemorySettings:
        """Its ``in_memory`` block; ConfigError with every problem in it."""
        return resolve_dataset(self.entry.get(DATASET_BLOCK), where=f"{self.where}.{DATASET_BLOCK}")

    def problems(self) -> list[Problem]:
        """What is written wrongly: what was meant to hold it in memory and would not, and a block that is not sound."""
        found = _misspellings(self)
        if self.in_memory:
            if self.held_folder is None:
                remedy = "name the folder to hold in memory"
                found.append(Problem(f"{self.where}.instance_data_dir", "not set", remedy))
            try:
                self.settings()
            except ConfigError as bad:
                found.extend(bad.problems)
        return found

    @property
    def captions_beside(self) -> bool:
        """Does SimpleTuner look for a ``.txt`` beside each sample, and stop where there is none?"""
        alone = self.entry.get("only_instance_prompt") or self.run.get("only_instance_prompt")
        strategy = self.entry.get("caption_strategy", self.run.get("caption_strategy"))
        return self.kind in _CAPTIONED and strategy == "textfile" and not is_true(alone) and not self._listed_before

    @property
    def _listed_before(self) -> bool:
        """Is the run told not to look through the folder, because its index has been made elsewhere?"""
        return any(bool(given.get("skip_file_discovery")) for given in (self.entry, self.run))

    def missing(self) -> list[Problem]:
        """What it names and this machine does not have: the folder, samples in it, captions beside them."""
        folder = self.local_folder
        if folder is None:
            return []
        where = f"{self.where}.instance_data_dir"
        if not folder.is_dir():
            literal = str(folder).startswith("~") or "$" in str(folder)
            remedy = "SimpleTuner expands no ~ and no $: write it out" if literal else "create it or correct the path"
            return [Problem(where, f"{str(folder)!r}: no such folder", remedy)]
        if self._listed_before:
            return []
        found = self.survey
        assert found is not None
        if not found.files:
            return [Problem(where, f"{str(folder)!r}: no files in it", "mount the data, or correct the path")]
        if self.kind in _CAPTIONED and not found.samples and not found.others:
            return [
                Problem(
                    where, f"{str(folder)!r}: {counted(found.files, 'file')}, none of them an image or a video", _PLACE
                )
            ]
        return [self._uncaptioned(folder, found)] if self.captions_beside and found.without_caption else []

    def _uncaptioned(self, folder: Path, found: Survey) -> Problem:
        lacking = found.samples - found.captioned
        names = ", ".join(found.without_caption) + (", ..." if lacking > len(found.without_caption) else "")
        message = f"'textfile', but {lacking} of {found.samples} files in {str(folder)!r} have no .txt caption: {names}"
        remedy = "write the captions, or set it to 'filename' or 'instanceprompt'"
        return Problem(f"{self.where}.caption_strategy", message, remedy)


def is_true(value: object) -> bool:
    return value is True or str(value).strip().lower() in {"1", "true", "yes", "on"}


def with_in_memory_for_all(entries: list[dict[str, Any]], block: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The entries with the older training-wide ``data_backend`` spelling applied to every local image dataset.

    Without it they are upstream's own object, whatever that is.
    """
    if block is None:
        return entries
    return [
        {**entry, "type": IN_MEMORY, DATASET_BLOCK: block}
        if (dataset := Dataset(entry)).type == "local" and dataset.kind == "image"
        else entry
        for entry in entries
    ]


def _misspellings(dataset: Dataset) -> list[Problem]:
    problems = []
    if not dataset.in_memory:
        theirs = dataset.type == "memory" and dataset.kind in _HOLD_CACHES  # SimpleTuner's own, since 4.5
        if _alike(dataset.type, IN_MEMORY) > 0.75 and not theirs:
            problems.append(
                Problem(f"{dataset.where}.type", f"{dataset.type!r} is unknown", "did you mean 'in_memory'?")
            )
        elif DATASET_BLOCK in dataset.entry:
            message = f"has no effect on type {dataset.type!r}"
            problems.append(Problem(f"{dataset.where}.in_memory", message, 'set "type": "in_memory"'))
    for key in dataset.entry:
        if key != DATASET_BLOCK and _alike(key, DATASET_BLOCK) > 0.8:
            problems.append(Problem(f"{dataset.where}.{key}", "unknown key", "did you mean 'in_memory'?"))
    return problems


def _alike(word: str, wanted: str) -> float:
    return difflib.SequenceMatcher(None, word, wanted).ratio()
