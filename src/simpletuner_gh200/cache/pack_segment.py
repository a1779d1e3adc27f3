"""A pack as a segment: its entries are read where they lie, and checked at every read.

The pages are the page cache's: there once for all ranks, jobs and restarts, and read from disk again where the kernel
took them back. Nothing maps them: what somebody does to the file would end a process that touches a mapping of it
(SIGBUS), or change bytes after they were checked. Read through the descriptor, it costs the entry that it hits.
"""

from __future__ import annotations

import os
import weakref

import numpy as np

from simpletuner_gh200.cache.pack import Pack, hot_buffer, read_checked, read_layout
from simpletuner_gh200.cache.record import Bytes
from simpletuner_gh200.errors import CacheError


class DamagedEntry(CacheError):
    """What a pack holds is not what was written to it, or can't be read."""


class PackSegment:
    """Answers like ``Segment``; there is no address, since nothing of it is in this process's memory."""

    slab = None
    address = None

    def __init__(self, pack: Pack) -> None:
        self._path, self._size = pack.path, pack.size
        layouts = np.unique(pack.rows[["layout_offset", "layout_checksum"]])
        self._layouts: dict[int, int] = dict(layouts.tolist())
        filled = pack.rows[pack.rows["length"] > 0]  # in the order of their offsets, no two of which are the same
        self._offsets = filled["offset"].copy()
        self._checks = np.column_stack((filled["length"], filled["checksum"]))
        self.fd = os.dup(pack.fd)
        weakref.finalize(self, os.close, self.fd)

    @classmethod
    def reached(cls, fd: int) -> PackSegment:
        """Of a pack that another rank has open. Takes over ``fd``."""
        with Pack.over(fd) as pack:
            return cls(pack)

    def bytes_at(self, offset: int, size: int) -> Bytes:
        """A copy, the caller's own. Raises DamagedEntry."""
        made = np.empty(size, np.uint8)
        self._read(made, offset)
        return made

    copy_of = bytes_at

    def copy_into(self, target: Bytes, offset: int, size: int, skip: int) -> None:
        """As much as ``target`` holds of an entry, from ``skip`` on; all of the entry is checked."""
        if target.nbytes == size:
            self._read(target, offset)
            return
        whole = hot_buffer(size)
        self._read(whole, offset)
        target[:] = whole[skip : skip + target.nbytes]

    def layout_text(self, offset: int) -> bytes:
        text = read_layout(self.fd, offset, self._layouts.get(offset, -1), self._size)
        if text is None:
            raise self._damaged(offset)
        return text

    def lend(self, offset: int, size: int) -> Bytes | None:
        return None

    def lent_offset(self, address: int) -> int | None:
        return None

    def _read(self, target: Bytes, offset: int) -> None:
        if not target.nbytes:
            return
        at = int(self._offsets.searchsorted(np.uint64(offset)))
        length, checksum = self._checks[at].tolist() if at < len(self._offsets) else (0, 0)
        if length != target.nbytes or not read_checked(self.fd, target, offset, checksum):
            raise self._damaged(offset)

    def _damaged(self, offset: int) -> DamagedEntry:
        return DamagedEntry(f"{self._path}: what is at byte {offset} is not what was written there")
