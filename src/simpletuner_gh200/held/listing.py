"""All files of a data set: what is there, how large, and cut into work for the staging threads. All files of a cache.

A data set is looked for where SimpleTuner's own listing goes, without the same system folders. Links are followed and
each real folder is entered once. Names stay bytes, since a file name need not be text.
"""

from __future__ import annotations

import logging
import os
import stat
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, compress

import numpy as np

from simpletuner_gh200.config.datasets import SKIPPED_FOLDERS
from simpletuner_gh200.held.bulk import NO_FILE, FolderLister, library_if_any, look_at
from simpletuner_gh200.held.staging_report import FileProblem, FileProblems, extension_of

Trouble = Callable[[bytes, OSError, bool], None]
"""Is told what can't be read, why, and whether it is a link."""


@dataclass
class FileBatch:
    """Some plain files of one folder, whose name ends with a slash."""

    folder: bytes
    names: list[bytes]
    sizes: list[int]
    """0 where nobody asked: asking takes ten times as long as listing the names."""

    def paths(self) -> Iterator[bytes]:
        return (self.folder + name for name in self.names)


class Walk:
    """Everything below ``root``, part by part; ``tick`` is called again and again meanwhile."""

    def __init__(
        self,
        root: bytes,
        *,
        suffix: bytes = b"",
        measure: bool = True,
        skipped: Collection[bytes] = (),
        trouble: Trouble,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._suffix, self._measure, self._skipped = root, suffix, measure, skipped
        self._trouble, self._tick = trouble, tick
        native = library_if_any()
        self._lister = FolderLister(native, suffix, measure=measure) if native else None
        self._entered: dict[tuple[int, int], bytes] = {}
        self.aliases: list[tuple[bytes, bytes]] = []
        """(other path of a folder, path under which it was entered), for folders that links reach."""

    def __iter__(self) -> Iterator[FileBatch]:
        waiting = [(self._root, os.path.realpath(self._root) != self._root)]
        while waiting:
            folder, through_link = waiting.pop()
            inside: list[tuple[bytes, bool]] = []
            self._tick()
            try:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    if self._first_visit(fd, folder, through_link):
                        yield from self._folder(fd, folder + b"/", inside)
                finally:
                    os.close(fd)
            except OSError as unreadable:
                self._trouble(folder, unreadable, False)
            waiting.extend(reversed(inside))

    def _first_visit(self, fd: int, folder: bytes, through_link: bool) -> bool:
        found = os.fstat(fd)
        before = self._entered.setdefault((found.st_dev, found.st_ino), folder)
        if before is not folder:
            self.aliases.append((folder + b"/", before + b"/"))
        elif through_link:
            self.aliases.append((os.path.realpath(folder) + b"/", folder + b"/"))
        return before is folder

    def _folder(self, fd: int, prefix: bytes, inside: list[tuple[bytes, bool]]) -> Iterator[FileBatch]:
        """Asked through the folder's descriptor: the kernel then need not walk the whole path again for every file."""
        for names, sizes in self._entries(fd):
            self._tick()
            plain = sizes != NO_FILE
            others = [] if plain.all() else list(compress(names, ~plain))
            if others:
                names, sizes = list(compress(names, plain)), sizes[plain]
            if names:
                yield FileBatch(prefix, names, sizes.tolist())
            if others:
                yield from self._look_at(fd, prefix, others, inside)

    def _entries(self, fd: int) -> Iterator[tuple[list[bytes], np.ndarray]]:
        if self._lister is None:
            names = [os.fsencode(name) for name in os.listdir(fd)]
            yield names, np.full(len(names), NO_FILE, np.uint64)
            return
        while (found := self._lister.next(fd))[0]:
            yield found

    def _look_at(
        self, fd: int, prefix: bytes, names: list[bytes], inside: list[tuple[bytes, bool]]
    ) -> Iterator[FileBatch]:
        """Links, folders, what can't be asked: one by one. The files among them; folders go to ``inside``."""
        files = FileBatch(prefix, [], [])
        for name in names:
            try:
                found = os.stat(name, dir_fd=fd)
            except OSError as broken:
                self._trouble(prefix + name, broken, os.path.islink(prefix + name))
                continue
            if stat.S_ISDIR(found.st_mode):
                if name not in self._skipped:
                    inside.append((prefix + name, os.path.islink(prefix + name)))
            elif stat.S_ISREG(found.st_mode) and name.endswith(self._suffix):
                files.names.append(name)
                files.sizes.append(found.st_size)
        if files.names:
            yield files


logger = logging.getLogger("simpletuner_gh200")

_SKIPPED = frozenset(os.fsencode(name) for name in SKIPPED_FOLDERS)

BATCH_BYTES = 512 << 10
BATCH_FILES = 256
SAMPLES_PER_EXTENSION = 16


def is_bookkeeping(name: bytes) -> bool:
    """Files that SimpleTuner rewrites while it runs, so that they are always read from disk."""
    return name.endswith(b".json") or name.startswith(b"aspect_ratio_bucket_")


def is_caption(path: bytes) -> bool:
    """Read by SimpleTuner one by one before training starts."""
    return path.endswith(b".txt")


@dataclass
class ExtensionTotals:
    files: int = 0
    size: int = 0
    samples: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass
class Listing:
    """Everything found under ``root``."""

    root: bytes
    batches: list[FileBatch] = field(default_factory=list)
    """Each at most ``BATCH_BYTES`` together, or a single larger file."""
    files: int = 0
    size: int = 0
    extensions: dict[str, ExtensionTotals] = field(default_factory=dict)
    aliases: list[tuple[bytes, bytes]] = field(default_factory=list)
    """(other path of a folder, path under which it was staged), for folders that links reach twice."""
    problems: FileProblems = field(default_factory=FileProblems)

    def add(self, folder: bytes, names: list[bytes], sizes: list[int]) -> None:
        """Some files of one folder: cut into batches, as many files as fit and at least one, and counted."""
        ends = list(accumulate(sizes))
        start, before, count = 0, 0, len(names)
        while start < count:
            end = bisect_right(ends, before + BATCH_BYTES, start, min(start + BATCH_FILES, count))
            end = max(end, start + 1)
            self.batches.append(FileBatch(folder, names[start:end], sizes[start:end]))
            start, before = end, ends[end - 1]
        self.files += count
        self.size += before
        places_of: defaultdict[bytes, list[int]] = defaultdict(list)
        for at, name in enumerate(names):
            places_of[name[name.rfind(b".") :]].append(at)
        for ending, places in places_of.items():
            totals = self.extensions.setdefault(extension_of(ending), ExtensionTotals())
            # Files 1, 2, 4, 8 ... of an extension: spread over the folders without knowing how many there will be.
            while len(totals.samples) < SAMPLES_PER_EXTENSION:
                at = (1 << len(totals.samples)) - 1 - totals.files
                if at >= len(places):
                    break
                totals.samples.append((folder + names[places[at]], sizes[places[at]]))
            totals.files += len(places)
            totals.size += sum(map(sizes.__getitem__, places))

    def part(self, wanted: Callable[[bytes], bool]) -> Listing:
        """Those files whose path is wanted, as a listing of their own; problems that were met so far stay here."""
        part = Listing(self.root, aliases=self.aliases)
        for batch in self.batches:
            chosen = [wanted(path) for path in batch.paths()]
            if any(chosen):
                part.add(batch.folder, list(compress(batch.names, chosen)), list(compress(batch.sizes, chosen)))
        return part


def list_files(
    root: str | os.PathLike[str], extensions: tuple[str, ...] | None = None, *, tick: Callable[[], None] = lambda: None
) -> Listing:
    """List every regular file under ``root`` (of these extensions, if given). An empty folder is an empty listing.

    ``tick`` is called again and again meanwhile.
    """
    top = os.fsencode(os.path.abspath(os.fspath(root)))
    endings = tuple(b"." + os.fsencode(ending.lower().lstrip(".")) for ending in extensions) if extensions else None
    listing = Listing(top)
    walk = Walk(top, skipped=_SKIPPED, trouble=partial(_note, listing.problems), tick=tick)
    for part in walk:
        wanted = [
            not is_bookkeeping(name) and (endings is None or name.lower().endswith(endings)) for name in part.names
        ]
        listing.add(part.folder, list(compress(part.names, wanted)), list(compress(part.sizes, wanted)))
    listing.aliases = walk.aliases
    return listing


def _note(problems: FileProblems, path: bytes, error: OSError, link: bool) -> None:
    problems.add(FileProblem.from_error(path, error, link=link))


# -- caches ------------------------------------------------------------------------------------------

CACHE_SUFFIX = b".pt"

SAMPLES = 1024
"""Files of which the sizes are asked, to know about how much all come to: asking takes far longer than listing."""


@dataclass
class CacheListing:
    """The files of one cache. Paths are put together only when they are asked for: a start needs counts and sizes."""

    parts: list[FileBatch] = field(default_factory=list)

    @cached_property
    def count(self) -> int:
        return sum(len(part.names) for part in self.parts)

    @cached_property
    def size(self) -> int:
        """Bytes of all files, from those of some; a file that went meanwhile has none."""
        step = -(-self.count // SAMPLES)
        sizes = [size for part in self.parts if (some := part.names[::step]) for size in _sizes(part.folder, some)]
        return sum(sizes) * self.count // max(len(sizes), 1)

    def paths(self) -> Iterator[str]:
        for part in self.parts:
            yield from map(os.fsdecode, part.paths())


def _sizes(folder: bytes, names: Sequence[bytes]) -> list[int]:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it went with all that was in it
        return [0] * len(names)
    try:
        sizes: list[int] = look_at(names, fd)["size"].tolist()
        return sizes
    finally:
        os.close(fd)


def cache_files(folder: str, tick: Callable[[], None] = lambda: None) -> CacheListing:
    """Every cache file under ``folder``; ``tick`` is called again and again."""
    top = os.fsencode(os.path.abspath(folder))
    return CacheListing(list(Walk(top, suffix=CACHE_SUFFIX, measure=False, trouble=_say, tick=tick)))


def _say(path: bytes, unreadable: OSError, link: bool) -> None:
    if not link and not isinstance(unreadable, FileNotFoundError):
        logger.warning("gh200: what is in %s is not held in memory: %s", os.fsdecode(path), unreadable)
