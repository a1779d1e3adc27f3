"""What lies in a dataset's folder: one quick look at names, and at sizes where they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
