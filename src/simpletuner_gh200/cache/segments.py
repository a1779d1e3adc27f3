"""The segments of one cache as this process sees them: its own, which it appends to, and those of other ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simpletuner_gh200.cache import layout as layouts
from simpletuner_gh200.cache.control import Control, SegmentRow
from simpletuner_gh200.cache.layout import Layout
from simpletuner_gh200.cache.pack import Pack
from simpletuner_gh200.cache.pack_segment import PackSegment
from simpletuner_gh200.cache.record import aligned
from simpletuner_gh200.cache.segment import HostSlabs, Segment, SlabSource, Writer, place, places
from simpletuner_gh200.cache.slots import Range, Slot, pack
from simpletuner_gh200.errors import CacheError, MemoryRoomError
from simpletuner_gh200.memory.mapping import PAGE
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import GIB

MOST_LAYOUTS = 4096
"""Layouts kept at hand. Caches have a few; one whose every entry carries its own text reads them from the segment."""

GROWTH = GIB
"""Size of a further segment. Address space, not memory: pages are taken as they are written."""


LARGEST = 2 * GIB


def next_size(growth: int, held: int) -> int:
    """Size of the next segment: larger the more is held, so that few are needed and little of them is unused."""
    return max(growth, min(held // 32, LARGEST))


class Place(NamedTuple):
    """Room for one payload."""

    writer: Writer
    layout: Range
    payload: Range


class Room(NamedTuple):
    """Room for some of many payloads, in one segment."""

    writer: Writer
    segment: int
    numbers: np.ndarray
    """Which of them."""
    offsets: np.ndarray
    layouts: np.ndarray
    """Where each one's layout is, in the words of a slot."""


class Segments:
    """Looking up needs no lock; whoever reserves, adds or sweeps holds the control block's."""

    def __init__(
        self, name: str, control: Control, slabs: SlabSource | None, growth: int, *, mappable: bool = True
    ) -> None:
        """``mappable``: slabs can be mapped again, by other ranks and for lending; managed memory can't be."""
        self._name = name
        self._control = control
        self._slabs = slabs or HostSlabs()
        self._growth = growth
        self._mappable = mappable
        self._mapped: dict[int, Segment | PackSegment] = {}
        self._packs: dict[int, int] = {}
        """Number of the segment that each pack is, by its inode."""
        self._layouts: dict[int, Layout] = {}
        self._stored: dict[bytes, Range] = {}
        """Layouts this process has put into a segment."""
        self._writer: tuple[int, Writer] | None = None
        self._seen_drops = control.drops
        self._opening = threading.Lock()

    # -- looking up ------------------------------------------------------------------------------------

    def get(self, number: int) -> Segment | PackSegment | None:
        """The segment; mapped now, through the descriptor of the rank that made it, if that hasn't been done yet."""
        found = self._mapped.get(number)
        if found is not None:
            return found
        with self._opening:
            if number not in self._mapped:
                row = self._control.row(number)
                segment = self._reach(row) if row is not None else None
                if segment is None:
                    return None
                self._mapped[number] = segment
            return self._mapped[number]

    def layout_of(self, slot: Slot) -> Layout | None:
        found = self._layouts.get(slot.layout)
        return found if found is not None else self._read_layout(slot)

    def published_at(self, address: int) -> tuple[Slab, int] | None:
        """Slab and offset of the published bytes behind a lent ``address``; None for memory that isn't lent."""
        for segment in list(self._mapped.values()):
            offset = segment.lent_offset(address)
            if offset is not None and segment.slab is not None:
                return segment.slab, offset
        return None

    def _reach(self, row: SegmentRow) -> Segment | PackSegment | None:
        if row.is_pack and (known := self._own_pack(row)) is not None:
            return known
        mode = os.O_RDONLY if row.is_pack else os.O_RDWR
        try:
            fd = os.open(f"/proc/{row.pid}/fd/{row.fd}", mode | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_dev) != (row.inode, row.device):
                return None
            if row.is_pack:
                return PackSegment.reached(os.dup(fd))
            return Segment(self._slabs.attach(fd, row.size, label=self._name))
        except (MemoryRoomError, CacheError, OSError):
            return None
        finally:
            os.close(fd)

    def _own_pack(self, row: SegmentRow) -> PackSegment | None:
        """The same file as this process has it open: with one index, and there when the other rank is gone."""
        known = self._mapped.get(self._packs.get(row.inode, 0))
        if isinstance(known, PackSegment) and os.fstat(known.fd).st_dev == row.device:
            return known
        return None

    def _read_layout(self, slot: Slot) -> Layout | None:
        place = slot.layout_place
        segment = self.get(place.segment)
        if segment is None:
            return None
        parsed = layouts.parse(segment.layout_text(place.offset))
        if len(self._layouts) < MOST_LAYOUTS:
            self._layouts[slot.layout] = parsed
        return parsed

    # -- appending -------------------------------------------------------------------------------------

    def reserve(self, text: bytes, size: int, allowed: int | None) -> Place | None:
        """Room for a payload and, where it is new here, its layout's text; None where the budget has none."""
        known = self._stored.get(text)
        needed = size + (0 if known else aligned(len(text) + 8) + 64)
        if allowed is not None and self._control.held + self._taken_by(text, size, needed) > allowed:
            return None
        number, writer = self._writer_for(needed)
        before = writer.used
        layout = known or self._store_layout(number, writer, text)
        payload = Range(number, writer.reserve(size))
        self._control.hold(writer.used - before, number)
        return Place(writer, layout, payload)

    def _taken_by(self, text: bytes, size: int, needed: int) -> int:
        """Bytes that a payload and its layout will take to the last one, gaps for alignment included."""
        fits = self._writer is not None and self._writer[1].room_for(needed)
        start = end = self._writer[1].used if self._writer is not None and fits else 0
        for part in (size,) if text in self._stored else (len(text) + 8, size):
            end = place(end, part) + part
        return end - start

    def reserve_many(
        self, texts: Sequence[bytes], kinds: np.ndarray, sizes: np.ndarray, allowed: int | None
    ) -> list[Room]:
        """The same for many, of which most find their layout stored and their room in one segment.

        ``kinds``: which of ``texts`` is the layout of each.
        What the budget has no room for is in none of the rooms.
        """
        rooms: list[Room] = []
        at = 0
        while at < len(kinds):
            room = self._room_from(at, texts, kinds, sizes, allowed)
            if room is None:
                one = self.reserve(texts[kinds[at]], int(sizes[at]), allowed)
                at += 1
                if one is None:
                    continue
                layout = np.array([pack(one.layout)], np.uint64)
                where = np.array([one.payload.offset], np.uint64)
                room = Room(one.writer, one.payload.segment, np.array([at - 1]), where, layout)
            else:
                at += len(room.numbers)
            rooms.append(room)
        return rooms

    def _room_from(
        self, at: int, texts: Sequence[bytes], kinds: np.ndarray, sizes: np.ndarray, allowed: int | None
    ) -> Room | None:
        """For as many as the segment that is written has room for; None where the first needs more than that."""
        if self._writer is None:
            return None
        number, writer = self._writer
        stored = [self._stored.get(text) for text in texts]
        layouts = np.array([pack(known) if known else 0 for known in stored], np.uint64)[kinds[at:]]
        unknown = np.flatnonzero(layouts == 0)  # no place is 0: segments are counted from 1
        sizes = sizes[at : at + int(unknown[0])] if len(unknown) else sizes[at:]
        starts = places(writer.used, sizes)
        ends = starts + sizes
        left = writer.size if allowed is None else max(allowed - self._control.held, 0)
        count = int(np.searchsorted(ends, min(writer.end, writer.used + left), side="right"))
        if not count:
            return None
        self._control.hold(int(ends[count - 1]) - writer.used, number)
        writer.used = int(ends[count - 1])
        return Room(writer, number, np.arange(at, at + count), starts[:count], layouts[:count])

    def add(self, segment: Segment) -> int:
        """List a segment, so that this and other ranks find its bytes."""
        number = self._control.add_segment(segment.slab.fd, segment.slab.size)
        self._mapped[number] = segment
        return number

    def add_pack(self, pack: Pack) -> int:
        """List a pack as a segment, once."""
        number = self._packs.get(pack.inode, 0)
        if not number or self._control.row(number) is None:
            segment = PackSegment(pack)
            number = self._packs[pack.inode] = self._control.add_segment(segment.fd, pack.size, pack=True)
            self._mapped[number] = segment
        return number

    def populate(self) -> None:
        """Map the pages of all that this process wrote now rather than fault by fault in the first epoch."""
        for row in self._control.rows():
            segment = self._mapped.get(row.number) if row.pid == os.getpid() else None
            if isinstance(segment, Segment):
                segment.populate(row.held)

    def _store_layout(self, number: int, writer: Writer, text: bytes) -> Range:
        data = len(text).to_bytes(8, "little") + text
        place = Range(number, writer.reserve(len(data)))
        writer.fill(place.offset, [(0, np.frombuffer(data, np.uint8))])
        if len(self._stored) < MOST_LAYOUTS:
            self._stored[text] = place
        return place

    def _writer_for(self, needed: int) -> tuple[int, Writer]:
        if self._writer is None or not self._writer[1].room_for(needed):
            size = max(next_size(self._growth, self._control.held), needed + 4 * PAGE)
            segment = Segment(self._slabs.make(size, label=self._name, shared=self._mappable))
            self._writer = self.add(segment), Writer(segment.slab)
        return self._writer

    # -- letting go ------------------------------------------------------------------------------------

    def release(self, slot: Slot) -> None:
        """An entry went. A segment of this process without any goes too, unless something else in it is in use."""
        number = slot.segment
        row = self._control.row(number)
        if row is None or self._control.count_live(number, -1) or row.pid != os.getpid():
            return
        written = self._writer is not None and self._writer[0] == number
        if not written and number not in {place.segment for place in self._stored.values()}:
            self._control.drop_segment(number)

    def sweep(self) -> bool:
        """Forget segments that are no longer listed; True if there may have been some."""
        if self._seen_drops == self._control.drops:
            return False
        self._seen_drops = self._control.drops
        listed = {row.number for row in self._control.rows()}
        # Not closed: a reader in another thread may be on it. The mapping goes with the last reference.
        for number in [number for number in self._mapped if number not in listed]:
            del self._mapped[number]
        if self._writer is not None and self._writer[0] not in listed:
            self._writer = None
        self._layouts = {}
        self._stored = {text: place for text, place in self._stored.items() if place.segment in listed}
        return True

    def close(self) -> None:
        self._mapped = {}
        self._writer = None
