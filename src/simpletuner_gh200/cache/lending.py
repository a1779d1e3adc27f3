"""Zero-copy hits that callers may write to: borrowed views of a copy-on-write mapping.

A whole segment is mapped privately once, so its pages stay mapped from hit to hit. A hit borrows its entry's pages.
If the borrower writes, the kernel gives this process its own copy of the page: no other rank sees it. When the
borrower lets go, the pages are asked whether that happened (``/proc/self/pagemap``), and the written ones are thrown
away, so the next borrower sees the published bytes. While an entry is borrowed it is not lent again: a second reader
gets a copy. Entries that are lent start on a page of their own, so borrowers never share one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simpletuner_gh200.cache.record import Bytes
from simpletuner_gh200.memory.mapping import FORGET, MAP_NOW, PAGE, advise_pages

LEND_FROM = 256 * 1024
"""Smaller entries are copied: that costs no more, and they needn't start on a page of their own."""

# The top byte of a pagemap entry: 63 present, 62 swapped, 61 page of a file or of shared memory, 56 mapped only here.
_TOP_BYTE = slice(7, None, 8) if sys.byteorder == "little" else slice(0, None, 8)
_PRESENT_OR_SWAPPED = 0xC0
_OF_THE_FILE = 0x20
_CLEAN = bytes(state for state in range(256) if not state & _PRESENT_OR_SWAPPED or state & _OF_THE_FILE)


class _PageMap:
    """``/proc/self/pagemap`` of this process; a forked child opens its own."""

    def __init__(self) -> None:
        self._fd = -1
        self._pid = 0

    def open(self) -> bool:
        if self._pid != os.getpid():
            try:
                self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._fd = -1
            self._pid = os.getpid()
        return self._fd >= 0

    def written(self, address: int, pages: int) -> Sequence[int]:
        """Indexes of the pages that are this process's own copies."""
        top = os.pread(self._fd, pages * 8, address // PAGE * 8)[_TOP_BYTE]
        if len(top) == pages and not top.strip(_CLEAN):
            return ()
        if len(top) != pages:
            return range(pages)
        return [page for page, state in enumerate(top) if state & _PRESENT_OR_SWAPPED and not state & _OF_THE_FILE]


_pagemap = _PageMap()


class Loan:
    """One borrowed entry. numpy sees its bytes; when the last view of them is gone, ``__del__`` cleans up."""

    __slots__ = ("__array_interface__", "_address", "_end", "_lender", "_size")

    def __init__(self, lender: Lender, address: int, size: int) -> None:
        self._lender = lender
        self._address = address
        self._size = size
        self._end: Callable[[Lender, int, int], None] = Lender.end  # bound now: globals may be gone at exit
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}

    def __del__(self) -> None:
        self._end(self._lender, self._address, self._size)


class Lender:
    """Lends entries of one private mapping, which starts at ``address`` and is kept alive by ``owner``."""

    def __init__(self, owner: Any, address: int, size: int) -> None:
        self._owner = owner
        self._address = address
        self._size = size
        self._borrowed: dict[int, object] = {}

    def lend(self, offset: int, size: int) -> Bytes | None:
        """Writable bytes of the entry at ``offset``; None where it has to be copied instead."""
        if size < LEND_FROM or offset % PAGE or not _pagemap.open():
            return None
        address = self._address + offset
        token = object()
        # One atomic step decides between two threads that want the same entry.
        if self._borrowed.setdefault(address, token) is not token:
            return None
        return np.asarray(Loan(self, address, size))

    def offset_of(self, address: int) -> int | None:
        offset = address - self._address
        return offset if 0 <= offset < self._size else None

    def end(self, address: int, size: int, advise: Callable[[int, int, int], bool] = advise_pages) -> None:
        """A borrower let go: bring back the published bytes, then let the next one in."""
        for page in _pagemap.written(address, -(-size // PAGE)) if _pagemap.open() else range(-(-size // PAGE)):
            advise(address + page * PAGE, PAGE, FORGET)
        self._borrowed.pop(address, None)

    def populate(self, end: int) -> None:
        """Map the pages up to ``end`` now, in one go, instead of one fault at a time in the first epoch."""
        if end > 0:
            advise_pages(self._address, min(end, self._size), MAP_NOW)
