"""A segment: one run of published bytes in shared memory, mapped by every rank that reads it.

Bytes are appended and never changed, so readers need no lock and a segment can be dropped while someone still holds
views of it: the kernel keeps the pages until the last mapping is gone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from simpletuner_gh200.cache.lending import LEND_FROM, Lender
from simpletuner_gh200.cache.record import ALIGNMENT, Bytes, aligned
from simpletuner_gh200.memory.mapping import PAGE, map_file
from simpletuner_gh200.memory.slab import Slab


class SlabSource(Protocol):
    """Where segments get their memory: the memory room's ``SlabMaker``, or plain shared memory."""

    def make(self, size: int, *, label: str, shared: bool) -> Slab: ...

    def attach(self, fd: int, size: int, *, label: str) -> Slab: ...


class HostSlabs:
    """Plain shared memory of the host."""

    def make(self, size: int, *, label: str, shared: bool) -> Slab:
        return Slab.shared(size, label=label)

    def attach(self, fd: int, size: int, *, label: str) -> Slab:
        return Slab.attach(fd, size, label=label)


class Segment:
    """Reads of one segment. ``slab`` is never written through; hits borrow from a second, private mapping.

    Memory that can't be mapped a second time (managed memory) is not lent: every hit there is a copy.
    """

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.address = slab.address
        self._lender: Lender | None = None
        if slab.fd is not None:
            lent = map_file(slab.fd, slab.size, private=True)  # no descriptor of its own: there are many segments
            self._lender = Lender(lent, lent.address, slab.size)

    def bytes_at(self, offset: int, size: int) -> Bytes:
        """The published bytes; not to be written to."""
        return self.slab.bytes_at(offset, size)

    def copy_of(self, offset: int, size: int) -> Bytes:
        return self.slab.bytes_at(offset, size).copy()

    def copy_into(self, target: Bytes, offset: int, size: int, skip: int) -> None:
        """As much as ``target`` holds of the entry of ``size`` bytes at ``offset``, from ``skip`` on."""
        target[:] = self.slab.bytes_at(offset + skip, target.nbytes)

    def layout_text(self, offset: int) -> bytes:
        length = int.from_bytes(self.bytes_at(offset, 8).tobytes(), "little")
        return self.bytes_at(offset + 8, length).tobytes()

    def lend(self, offset: int, size: int) -> Bytes | None:
        return self._lender.lend(offset, size) if self._lender is not None else None

    def lent_offset(self, address: int) -> int | None:
        """Where in the segment a lent ``address`` is; None for any other address."""
        return self._lender.offset_of(address) if self._lender is not None else None

    def populate(self, end: int) -> None:
        """Map the pages up to ``end`` now rather than fault by fault in the first epoch."""
        if self._lender is not None:
            self._lender.populate(end)


class Writer:
    """Appends to a segment that this process made."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.size = slab.size
        self.fd, self.address = slab.fd, slab.address
        """Where to write: through the descriptor if there is one."""
        self.used = 0

    @property
    def end(self) -> int:
        """Where entries end at the latest; twice aligned: a layout may go in front of the payload."""
        return self.size - 2 * PAGE

    def room_for(self, size: int) -> bool:
        return place(self.used, size) + size <= self.end

    def reserve(self, size: int) -> int:
        """Set room for an entry aside; returns where it starts. Callers hold the table's lock."""
        start = place(self.used, size)
        self.used = start + size
        return start

    def fill(self, start: int, pieces: Sequence[tuple[int, Bytes]]) -> None:
        """Write a reserved entry. Needs no lock: nobody knows of it until it is published."""
        for offset, data in pieces:
            if self._slab.fd is not None:
                _write_all(self._slab.fd, data, start + offset)
            else:
                self._slab.bytes_at(start + offset, data.nbytes)[:] = data


def place(used: int, size: int) -> int:
    """Where the next entry of ``size`` bytes starts: on a page of its own if it will be lent."""
    if size >= LEND_FROM:
        return -(-used // PAGE) * PAGE
    return aligned(used)


def places(used: int, sizes: np.ndarray) -> np.ndarray:
    """Where further entries of these sizes start, one behind the other."""
    lent = sizes >= LEND_FROM
    if not len(sizes) or lent.any() != lent.all():
        starts = []
        for size in sizes.tolist():
            starts.append(place(used, size))
            used = starts[-1] + size
        return np.array(starts, np.uint64)
    unit = PAGE if lent[0] else ALIGNMENT
    steps = -(-sizes.astype(np.int64) // unit) * unit
    return (np.cumsum(steps) - steps + place(used, int(sizes[0]))).astype(np.uint64)


def _write_all(fd: int, data: Bytes, offset: int) -> None:
    """Through the descriptor, not the mapping: pages that are written whole needn't be cleared first."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
