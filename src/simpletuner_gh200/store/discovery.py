"""Finding every file of a dataset in one pass: what is there, how large, and cut into work for the staging threads.

It goes where SimpleTuner's own listing goes: it follows links, enters each real folder once, and skips the same
system folders. Names stay bytes, since a file name need not be text.
"""

from __future__ import annotations

import os
import stat
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, compress, islice

from simpletuner_gh200.config.datasets import SKIPPED_FOLDERS
from simpletuner_gh200.store.native import OTHER, FolderLister, usable
from simpletuner_gh200.store.problems import FileProblem, FileProblems

Entries = tuple[list[bytes], "array[int]", list[bytes]]
"""Some of a folder: plain files with their sizes, and the names of whatever else is there."""

_SKIPPED = frozenset(os.fsencode(name) for name in SKIPPED_FOLDERS)

BATCH_BYTES = 512 << 10
BATCH_FILES = 256
ENTRIES_AT_ONCE = 1024
"""Of a folder: so that one of a million files is not held whole as directory entries."""

SAMPLES_PER_EXTENSION = 16


def is_bookkeeping(name: bytes) -> bool:
    """Files that SimpleTuner rewrites while it runs, so that they are always read from disk."""
    return name.endswith(b".json") or name.startswith(b"aspect_ratio_bucket_")


@dataclass
class Batch:
    """Some files of one folder: at most ``BATCH_BYTES`` together, or a single larger one."""

    folder: bytes
    first: int
    """Number of the first file; the others follow."""
    names: list[bytes] = field(default_factory=list)
    sizes: array[int] = field(default_factory=lambda: array("Q"))

    def paths(self) -> Iterator[bytes]:
        return (self.folder + name for name in self.names)


@dataclass
class ExtensionTotals:
    files: int = 0
    size: int = 0
    samples: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass
class Listing:
    """Everything found under ``root``."""

    root: bytes
    batches: list[Batch] = field(default_factory=list)
    files: int = 0
    size: int = 0
    extensions: dict[str, ExtensionTotals] = field(default_factory=dict)
    aliases: list[tuple[bytes, bytes]] = field(default_factory=list)
    """(other path of a folder, path under which it was staged), for folders that links reach twice."""
    problems: FileProblems = field(default_factory=FileProblems)


def walk(
    root: str | os.PathLike[str],
    extensions: tuple[str, ...] | None = None,
    *,
    only: Callable[[bytes], bool] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Listing:
    """List every regular file under ``root`` (of these extensions, if given). An empty folder is an empty listing.

    ``only`` is asked about the path of each file where it is given; ``tick`` is called again and again meanwhile.
    """
    top = os.fsencode(os.path.abspath(os.fspath(root)))
    endings = tuple(b"." + os.fsencode(ending.lower().lstrip(".")) for ending in extensions) if extensions else None
    listing = Listing(top)
    _Walker(listing, endings, only, tick).enter(top)
    return listing


def part_of(listing: Listing, wanted: Callable[[bytes], bool]) -> Listing:
    """Those files of a listing whose path is wanted, as a listing of their own: the folder is not walked again."""
    part = Listing(listing.root, aliases=listing.aliases)
    for batch in listing.batches:
        chosen = [wanted(batch.folder + name) for name in batch.names]
        names, sizes = list(compress(batch.names, chosen)), array("Q", compress(batch.sizes, chosen))
        if names:
            _cut(part, batch.folder, names, sizes)
            _count(part, batch.folder, names, sizes)
    return part


class _Walker:
    def __init__(
        self,
        listing: Listing,
        endings: tuple[bytes, ...] | None,
        only: Callable[[bytes], bool] | None,
        tick: Callable[[], None],
    ) -> None:
        self._listing = listing
        self._endings = endings
        self._only = only
        self._tick = tick
        self._entered: dict[tuple[int, int], bytes] = {}
        library = usable()
        self._entries = partial(_entries_native, FolderLister(library)) if library else _entries_python

    def enter(self, top: bytes) -> None:
        waiting = [(top, os.path.realpath(top) != top)]
        while waiting:
            folder, through_link = waiting.pop()
            inside: list[tuple[bytes, bool]] = []
            try:
                if self._first_visit(folder, through_link):
                    self._folder(folder, inside)
            except OSError as unreadable:
                self._listing.problems.add(FileProblem.from_error(folder, unreadable))
            waiting.extend(reversed(inside))

    def _first_visit(self, folder: bytes, through_link: bool) -> bool:
        found = os.stat(folder)
        identity = (found.st_dev, found.st_ino)
        before = self._entered.get(identity)
        if before is not None:
            self._listing.aliases.append((folder + b"/", before + b"/"))
            return False
        self._entered[identity] = folder
        if through_link:
            self._listing.aliases.append((os.path.realpath(folder) + b"/", folder + b"/"))
        return True

    def _folder(self, folder: bytes, inside: list[tuple[bytes, bool]]) -> None:
        """List one folder; ``inside`` gets the folders in it, and whether a link leads there.

        Asked through the folder's descriptor: the kernel then need not walk the whole path again for every file.
        """
        prefix = folder + b"/"
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for names, sizes, others in self._entries(fd):
                self._tick()
                self._take(prefix, names, sizes)
                if others:
                    self._take(prefix, *self._look_at(fd, prefix, others, inside))
        finally:
            os.close(fd)

    def _look_at(
        self, fd: int, prefix: bytes, names: list[bytes], inside: list[tuple[bytes, bool]]
    ) -> tuple[list[bytes], array[int]]:
        """Links, folders, what can't be asked: one by one. Returns the files among them; folders go to ``inside``."""
        files: list[bytes] = []
        sizes = array("Q")
        for name in names:
            try:
                found = os.stat(name, dir_fd=fd)
            except OSError as broken:
                link = os.path.islink(prefix + name)
                self._listing.problems.add(FileProblem.from_error(prefix + name, broken, link=link))
                continue
            if stat.S_ISDIR(found.st_mode):
                if name not in _SKIPPED:
                    inside.append((prefix + name, os.path.islink(prefix + name)))
            elif stat.S_ISREG(found.st_mode):
                files.append(name)
                sizes.append(found.st_size)
        return files, sizes

    def _take(self, prefix: bytes, names: list[bytes], sizes: array[int]) -> None:
        """Put these files of one folder on the list, except those that nobody asked for."""
        if self._endings is not None or self._only is not None or _may_hold_bookkeeping(names):
            wanted = [self._wants(prefix, name) for name in names]
            names, sizes = list(compress(names, wanted)), array("Q", compress(sizes, wanted))
        _cut(self._listing, prefix, names, sizes)
        _count(self._listing, prefix, names, sizes)

    def _wants(self, prefix: bytes, name: bytes) -> bool:
        if is_bookkeeping(name) or (self._endings is not None and not name.lower().endswith(self._endings)):
            return False
        return self._only is None or self._only(prefix + name)


def _may_hold_bookkeeping(names: list[bytes]) -> bool:
    """Asked of all at once, since it is hardly ever so."""
    joined = b"/".join(names)
    return b".json" in joined or b"aspect_ratio_bucket_" in joined


def _entries_native(lister: FolderLister, folder: int) -> Iterator[Entries]:
    while True:
        names, sizes = lister.next(folder)
        if not names:
            return
        plain = sizes != OTHER
        if plain.all():
            yield names, array("Q", sizes.tobytes()), []
        else:
            yield list(compress(names, plain)), array("Q", sizes[plain].tobytes()), list(compress(names, ~plain))


def _entries_python(folder: int) -> Iterator[Entries]:
    with os.scandir(folder) as entries:
        while some := list(islice(entries, ENTRIES_AT_ONCE)):
            try:
                files = [entry for entry in some if entry.is_file()]
                sizes = array("Q", [entry.stat().st_size for entry in files])
            except OSError:  # one of them vanished, or is a link that can't be followed
                files, sizes = [], array("Q")
            plain = set(files)
            yield (
                [os.fsencode(entry.name) for entry in files],
                sizes,
                [os.fsencode(entry.name) for entry in some if entry not in plain],
            )


def _cut(listing: Listing, prefix: bytes, names: list[bytes], sizes: array[int]) -> None:
    """Cut one folder's files into batches: as many as fit, at least one."""
    ends = list(accumulate(sizes))
    start, before, count = 0, 0, len(names)
    while start < count:
        end = bisect_right(ends, before + BATCH_BYTES, start, min(start + BATCH_FILES, count))
        end = max(end, start + 1)
        listing.batches.append(Batch(prefix, listing.files + start, names[start:end], sizes[start:end]))
        start, before = end, ends[end - 1]
    listing.files += count
    listing.size += before


def _count(listing: Listing, prefix: bytes, names: list[bytes], sizes: array[int]) -> None:
    """Count one folder's files by extension, and remember some of each as samples."""
    for ending, places in _by_ending(names).items():
        totals = listing.extensions.setdefault(extension_of(ending), ExtensionTotals())
        # Files 1, 2, 4, 8 ... of an extension: spread over the folders without knowing how many there will be.
        while len(totals.samples) < SAMPLES_PER_EXTENSION:
            at = (1 << len(totals.samples)) - 1 - totals.files
            if at >= len(places):
                break
            totals.samples.append((prefix + names[places[at]], sizes[places[at]]))
        totals.files += len(places)
        totals.size += sum(map(sizes.__getitem__, places))


def _by_ending(names: list[bytes]) -> Mapping[bytes, Sequence[int]]:
    """Places of the names with each ending. Mostly there is one: that is asked of all at once."""
    first = names[0][names[0].rfind(b".") :] if names else b""
    if first.startswith(b".") and (b"/".join(names) + b"/").count(first + b"/") == len(names):
        return {first: range(len(names))}
    found: defaultdict[bytes, list[int]] = defaultdict(list)
    for at, name in enumerate(names):
        found[name[name.rfind(b".") :]].append(at)
    return found


def extension_of(name: bytes) -> str:
    """``b"a/b.JPG"`` -> ``jpg``; the empty text where there is none."""
    _stem, dot, ending = name.rpartition(b".")
    return ending.decode("ascii", "replace").lower() if dot and len(ending) <= 16 else ""
