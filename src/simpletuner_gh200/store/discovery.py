"""Finding every file of a dataset in one pass: what is there, how large, and cut into work for the staging threads.

It goes where SimpleTuner's own listing goes: it follows links, enters each real folder once, and skips the same
system folders. Names stay bytes, since a file name need not be text.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from simpletuner_gh200.store.problems import Problem, Problems

SKIPPED_FOLDERS = frozenset(
    {b".Spotlight-V100", b".Trashes", b".fseventsd", b".TemporaryItems", b".zfs", b".ipynb_checkpoints"}
)

BATCH_BYTES = 512 << 10
BATCH_FILES = 256
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
    problems: Problems = field(default_factory=Problems)


def walk(
    root: str | os.PathLike[str],
    extensions: tuple[str, ...] | None = None,
    *,
    only: Callable[[bytes], bool] | None = None,
) -> Listing:
    """List every regular file under ``root`` (of these extensions, if given). An empty folder is an empty listing.

    ``only`` is asked about the path of each file where it is given.
    """
    top = os.fsencode(os.path.abspath(os.fspath(root)))
    endings = tuple(b"." + os.fsencode(ending.lower().lstrip(".")) for ending in extensions) if extensions else None
    listing = Listing(top)
    _Walker(listing, endings, only).enter(top)
    return listing


class _Walker:
    def __init__(
        self, listing: Listing, endings: tuple[bytes, ...] | None, only: Callable[[bytes], bool] | None
    ) -> None:
        self._listing = listing
        self._endings = endings
        self._only = only
        self._entered: dict[tuple[int, int], bytes] = {}

    def enter(self, top: bytes) -> None:
        waiting = [(top, False)]
        while waiting:
            folder, through_link = waiting.pop()
            try:
                entered = self._first_visit(folder, through_link)
                if entered:
                    waiting.extend(reversed(self._folder(folder)))
            except OSError as unreadable:
                self._listing.problems.add(Problem.from_error(folder, unreadable))

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

    def _folder(self, folder: bytes) -> list[tuple[bytes, bool]]:
        """List one folder; returns the folders in it, and whether a link leads there.

        A million files pass through this loop, so the usual case, a plain file, is handled without a call.
        """
        inside: list[tuple[bytes, bool]] = []
        prefix, endings, only = folder + b"/", self._endings, self._only
        names: list[bytes] = []
        sizes = array("Q")
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                try:
                    if entry.is_file(follow_symlinks=False):
                        size = entry.stat(follow_symlinks=False).st_size
                    elif entry.is_dir():
                        if name not in SKIPPED_FOLDERS:
                            inside.append((prefix + name, entry.is_symlink()))
                        continue
                    else:
                        found = entry.stat()
                        if not stat.S_ISREG(found.st_mode):
                            continue
                        size = found.st_size
                except OSError as broken:
                    self._listing.problems.add(Problem.from_error(prefix + name, broken, link=entry.is_symlink()))
                    continue
                if name.endswith(b".json") or name.startswith(b"aspect_ratio_bucket_"):
                    continue
                if endings is not None and not name.lower().endswith(endings):
                    continue
                if only is None or only(prefix + name):
                    names.append(name)
                    sizes.append(size)
        _cut(self._listing, prefix, names, sizes)
        _count(self._listing, prefix, names, sizes)
        return inside


def _cut(listing: Listing, prefix: bytes, names: list[bytes], sizes: array[int]) -> None:
    """Cut one folder's files into batches."""
    start = room = 0
    for at, size in enumerate(sizes):
        if at == start:
            room = BATCH_BYTES - size
        elif size > room or at - start == BATCH_FILES:
            listing.batches.append(Batch(prefix, listing.files + start, names[start:at], sizes[start:at]))
            start, room = at, BATCH_BYTES - size
        else:
            room -= size
    if names:
        listing.batches.append(Batch(prefix, listing.files + start, names[start:], sizes[start:]))
    listing.files += len(names)
    listing.size += sum(sizes)


def _count(listing: Listing, prefix: bytes, names: list[bytes], sizes: array[int]) -> None:
    """Count one folder's files by extension, and remember some of each as samples."""
    endings = [name[name.rfind(b".") :] for name in names]
    known = {ending: listing.extensions.setdefault(extension_of(ending), ExtensionTotals()) for ending in set(endings)}
    for at, ending in enumerate(endings):
        totals = known[ending]
        totals.size += sizes[at]
        totals.files = count = totals.files + 1
        # Files 1, 2, 4, 8 ... of an extension: spread over the folders without knowing how many there will be.
        if not count & (count - 1) and len(totals.samples) < SAMPLES_PER_EXTENSION:
            totals.samples.append((prefix + names[at], sizes[at]))


def extension_of(name: bytes) -> str:
    """``b"a/b.JPG"`` -> ``jpg``; the empty text where there is none."""
    _stem, dot, ending = name.rpartition(b".")
    return ending.decode("ascii", "replace").lower() if dot and len(ending) <= 16 else ""
