"""Which cache files there are, and how large they are: one pass over each folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from simpletuner_gh200.held.bulk import look_at
from simpletuner_gh200.held.walk import FolderPart, Walk

logger = logging.getLogger("simpletuner_gh200")

SUFFIX = b".pt"

SAMPLES = 64
"""Files of which the sizes are asked where only about how much they come to has to be known."""


@dataclass
class CacheListing:
    """The files of one cache. Paths are put together only when they are asked for: a start needs counts and sizes."""

    parts: list[FolderPart] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(len(part.names) for part in self.parts)

    @property
    def measured(self) -> bool:
        return all(part.sizes is not None for part in self.parts)

    def measure(self, tick: Callable[[], None] = lambda: None) -> None:
        """Ask for the sizes that nobody asked for yet; a file that went meanwhile has none."""
        for part in self.parts:
            if part.sizes is None:
                tick()
                part.sizes = _sizes(part.folder, part.names)

    @property
    def size(self) -> int:
        """Bytes of all files; about, from a sample, where they were not measured."""
        known = sum(int(part.sizes.sum()) for part in self.parts if part.sizes is not None)
        rest = [part for part in self.parts if part.sizes is None]
        if not rest:
            return known
        count = sum(len(part.names) for part in rest)
        asked = [_sizes(part.folder, some) for part in rest if (some := part.names[:: max(count // SAMPLES, 1)])]
        return known + int(np.concatenate(asked).mean() * count)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """(absolute path, size)"""
        self.measure()
        for part in self.parts:
            assert part.sizes is not None
            prefix = os.fsdecode(part.folder)
            for name, size in zip(part.names, part.sizes.tolist(), strict=True):
                yield prefix + os.fsdecode(name), size

    def paths(self) -> Iterator[str]:
        for part in self.parts:
            prefix = os.fsdecode(part.folder)
            yield from (prefix + os.fsdecode(name) for name in part.names)


def _sizes(folder: bytes, names: Sequence[bytes]) -> np.ndarray:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it went with all that was in it
        return np.zeros(len(names), np.uint64)
    try:
        return look_at(names, fd)["size"].copy()
    finally:
        os.close(fd)


def cache_files(folder: str, tick: Callable[[], None] = lambda: None) -> CacheListing:
    """Every cache file under ``folder``; ``tick`` is called again and again."""
    top = os.fsencode(os.path.abspath(folder))
    return CacheListing(list(Walk(top, suffix=SUFFIX, measure=False, trouble=_say, tick=tick)))


def _say(path: bytes, unreadable: OSError, link: bool) -> None:
    if not link and not isinstance(unreadable, FileNotFoundError):
        logger.warning("gh200: what is in %s is not held in memory: %s", os.fsdecode(path), unreadable)
