"""Files of weights that were loaded for good: the memory that they take as page cache is given back.

Torch maps them (``UntypedStorage.from_file``, as safetensors does), so that a tensor which was loaded to the CPU is its
file's pages until it is copied somewhere. On a machine with one memory for both that is twice the model; on others the
driver still counts those pages as used. No root is needed and nothing is lost: who reads the file again reads the disk.
Pages that any process maps stay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from simpletuner_gh200.memory.driver.interface import Span
from simpletuner_gh200.memory.mapping import PAGE, advise_pages
from simpletuner_gh200.memory.regular_files import open_regular

logger = logging.getLogger("simpletuner_gh200")

UNMAP_PAGES = 4
"""MADV_DONTNEED: of a private mapping of a file, who reads there again has the file's bytes."""


def give_back(path: str, start: int = 0, size: int = 0) -> None:
    """A part of the file, or with ``size`` 0 all behind ``start``."""
    try:
        fd = open_regular(path)
    except OSError as refused:
        logger.info("gh200: the page cache of %s stays: %s", path, refused)
        return
    try:
        os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def give_back_mapped(spans: Iterable[Span], paths: set[str]) -> int:
    """Memory that nobody will look at any more, as far as it is private mappings of these files; the bytes of it.

    Whole pages only: what is left of them belongs to a neighbour as well.
    """
    mappings = list(_mappings(paths))
    found = 0
    for address, size in spans:
        for first, last, at, path in mappings:
            begin = -(-max(address, first) // PAGE) * PAGE
            end = min(address + size, last) // PAGE * PAGE
            if begin < end and advise_pages(begin, end - begin, UNMAP_PAGES):
                give_back(path, at + begin - first, end - begin)
                found += end - begin
    return found


def _mappings(paths: set[str]) -> Iterator[tuple[int, int, int, str]]:
    """(first, last, offset in the file, path) of what this process maps of them now, as the kernel tells."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        place, rights, offset, _device, inode, *name = line.split(maxsplit=5)
        if name and name[0] in paths and rights.endswith("p") and inode != "0":
            first, last = (int(number, 16) for number in place.split("-"))
            yield first, last, int(offset, 16), name[0]
