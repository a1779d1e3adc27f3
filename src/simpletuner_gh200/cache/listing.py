"""Which cache files there are, and how large they are: one pass over each folder."""

from __future__ import annotations

import ctypes
import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from simpletuner_gh200.cache.native import library

logger = logging.getLogger("simpletuner_gh200")

SUFFIX = ".pt"
ENTRIES_BYTES = 64 << 10

SAMPLES = 64
"""Files of which the sizes are asked where only about how much they come to has to be known."""


@dataclass
class _Part:
    """Some files of one folder."""

    folder: str
    names: list[bytes]
    sizes: np.ndarray | None
    """None until somebody needs them: asking for them takes ten times as long as listing the names."""


@dataclass
class CacheListing:
    """The files of one cache. Paths are put together only when they are asked for: a start needs counts and sizes."""

    parts: list[_Part] = field(default_factory=list)
    count: int = 0

    def add(self, folder: str, names: list[bytes], sizes: np.ndarray | None) -> None:
        self.parts.append(_Part(folder, names, sizes))
        self.count += len(names)

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
            prefix = part.folder.rstrip("/") + "/"
            for name, size in zip(part.names, part.sizes.tolist(), strict=True):
                yield prefix + os.fsdecode(name), size

    def paths(self) -> Iterator[str]:
        for part in self.parts:
            prefix = part.folder.rstrip("/") + "/"
            yield from (prefix + os.fsdecode(name) for name in part.names)


def _sizes(folder: str, names: list[bytes]) -> np.ndarray:
    found = np.zeros(len(names), np.uint64)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it went with all that was in it
        return found
    try:
        library().gh200_file_sizes(fd, b"\0".join(names), len(names), found.ctypes.data)
    finally:
        os.close(fd)
    return found


def cache_files(folder: str, tick: Callable[[], None] = lambda: None) -> CacheListing:
    """Every cache file under ``folder``, links to folders followed once; ``tick`` is called again and again."""
    listing = CacheListing()
    seen: set[tuple[int, int]] = set()
    waiting = [os.path.abspath(folder)]
    while waiting:
        current = waiting.pop()
        tick()
        try:
            fd = os.open(current, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as unreadable:
            _say(current, unreadable)
            continue
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            others = _list(fd, current, listing, tick)
            waiting += _look_at(fd, current, others, listing)
        except OSError as unreadable:
            _say(current, unreadable)
        finally:
            os.close(fd)
    return listing


def _say(folder: str, unreadable: OSError) -> None:
    if not isinstance(unreadable, FileNotFoundError):
        logger.warning("gh200: what is in %s is not held in memory: %s", folder, unreadable)


def _list(fd: int, folder: str, listing: CacheListing, tick: Callable[[], None]) -> list[str]:
    """Put plain cache files on the list; the names of whatever else is there."""
    scratch, names, others = (ctypes.create_string_buffer(ENTRIES_BYTES) for _ in range(3))
    counts = (ctypes.c_uint64 * 4)()
    left: list[str] = []
    while True:
        more = library().gh200_list_tensors(
            *(fd, SUFFIX.encode(), scratch, ENTRIES_BYTES),
            *(names, others, counts),
        )
        if more < 0:
            raise OSError(-more, os.strerror(-more))
        if more == 0:
            return left
        tick()
        plain, odd, plain_bytes, odd_bytes = counts
        if plain:
            listing.add(folder, ctypes.string_at(names, plain_bytes - 1).split(b"\0"), None)
        if odd:
            left += map(os.fsdecode, ctypes.string_at(others, odd_bytes - 1).split(b"\0"))


def _look_at(fd: int, folder: str, names: list[str], listing: CacheListing) -> list[str]:
    """Folders and links, one by one: cache files go on the list, folders come back."""
    folders: list[str] = []
    files: list[tuple[bytes, int]] = []
    for name in names:
        try:
            found = os.stat(name, dir_fd=fd)
        except OSError:  # it went since it was listed, or is a link that leads nowhere: the others are still there
            continue
        if stat.S_ISDIR(found.st_mode):
            folders.append(os.path.join(folder, name))
        elif stat.S_ISREG(found.st_mode) and name.endswith(SUFFIX):
            files.append((os.fsencode(name), found.st_size))
    if files:
        listing.add(folder, [name for name, _ in files], np.array([size for _, size in files], np.uint64))
    return folders
