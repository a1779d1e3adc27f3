"""Entries of a table: one that was found, and many that are to be published together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from simpletuner_gh200.cache.layout import Layout
from simpletuner_gh200.cache.pack_segment import PackSegment
from simpletuner_gh200.cache.record import Bytes
from simpletuner_gh200.cache.segment import Segment, Writer
from simpletuner_gh200.cache.segments import Room
from simpletuner_gh200.cache.slots import FINITE, Slot, row_words


class Found:
    """An entry at hand: its slot, its layout, and the segment that maps its payload in this process."""

    __slots__ = ("address", "at", "check", "layout", "length", "offset", "segment", "slot", "vouched_for")

    def __init__(self, slot: Slot, layout: Layout, segment: Segment | PackSegment) -> None:
        self.slot = slot
        self.layout = layout
        self.segment = segment
        self.offset, self.length = slot.offset, slot.length
        self.address = None if segment.address is None else segment.address + self.offset
        """Where the published bytes are; they stay there as long as this object lives. None: in a pack."""
        self.at, self.check = slot.at, slot.check
        self.vouched_for = False
        """The file was looked at after a watch on its folder began."""

    @property
    def finite(self) -> bool:
        return bool(self.slot.flags & FINITE)

    @property
    def payload(self) -> Bytes:
        """Published bytes; not to be written to. Raises DamagedEntry where they are in a pack and not as written."""
        return self.segment.bytes_at(self.offset, self.length)

    def copy(self) -> Bytes:
        """The same, the caller's own."""
        return self.segment.copy_of(self.offset, self.length)

    def copy_into(self, target: Bytes, skip: int) -> None:
        """As much of them as ``target`` holds, from ``skip`` on. Raises DamagedEntry too."""
        self.segment.copy_into(target, self.offset, self.length, skip)


class Ready(NamedTuple):
    """Entries whose bytes are at hand, for publishing together: columns, a row each."""

    keys: np.ndarray
    """Two words each."""
    layouts: Sequence[bytes]
    """The different ones."""
    kinds: np.ndarray
    """Which of them each has."""
    sizes: np.ndarray
    flags: np.ndarray
    sources: np.ndarray
    """Two words each."""

    def only(self, numbers: np.ndarray) -> Ready:
        """The same of some of them."""
        columns = (self.kinds, self.sizes, self.flags, self.sources)
        return Ready(self.keys[numbers], self.layouts, *(column[numbers] for column in columns))

    def rows(self, room: Room) -> np.ndarray:
        """Keys and words of slots of those that have room there."""
        which = room.numbers
        payload, length = row_words(room.segment, room.offsets, self.sizes[which], self.flags[which])
        return np.column_stack((self.keys[which], payload, length, self.sources[which], room.layouts))


Put = Callable[[Writer, np.ndarray, np.ndarray], None]
"""Writes the payloads of some entries, by their numbers, to their offsets in a segment."""
