"""Which files there are below a folder: one pass, for data sets and caches alike.

Links are followed and each real folder is entered once. Names stay bytes, since a file name need not be text.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import compress

import numpy as np

from simpletuner_gh200.held.bulk import NO_FILE, FolderLister, library_if_any

Trouble = Callable[[bytes, OSError, bool], None]
"""Is told what can't be read, why, and whether it is a link."""


@dataclass
class FolderPart:
    """Some plain files of one folder, whose name ends with a slash."""

    folder: bytes
    names: list[bytes]
    sizes: np.ndarray | None
    """None where nobody asked: asking takes ten times as long as listing the names."""


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

    def __iter__(self) -> Iterator[FolderPart]:
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

    def _folder(self, fd: int, prefix: bytes, inside: list[tuple[bytes, bool]]) -> Iterator[FolderPart]:
        """Asked through the folder's descriptor: the kernel then need not walk the whole path again for every file."""
        for names, sizes in self._entries(fd):
            self._tick()
            plain = sizes != NO_FILE
            others = [] if plain.all() else list(compress(names, ~plain))
            if others:
                names, sizes = list(compress(names, plain)), sizes[plain]
            if names:
                yield FolderPart(prefix, names, sizes if self._measure else None)
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
    ) -> Iterator[FolderPart]:
        """Links, folders, what can't be asked: one by one. The files among them; folders go to ``inside``."""
        files: list[tuple[bytes, int]] = []
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
                files.append((name, found.st_size))
        if files:
            yield FolderPart(prefix, [name for name, _ in files], np.array([size for _, size in files], np.uint64))
