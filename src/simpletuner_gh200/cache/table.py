"""One cache in memory: which files it holds, where their bytes are, and hits that are safe to write to.

>>> table = Table("vae-photos", Control.create(1000, label="vae", shared=False), allowed=None)
>>> table.publish(path, encode(value), source_of(path))
>>> value = table.get(path)            # MISSING, or what torch.load would return
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from simpletuner_gh200.cache import layout as layouts
from simpletuner_gh200.cache.control import Control, SegmentRow
from simpletuner_gh200.cache.layout import Layout
from simpletuner_gh200.cache.lending import PAGE
from simpletuner_gh200.cache.record import Bytes, Record, aligned, tensor_maker
from simpletuner_gh200.cache.segment import HostSlabs, Segment, SlabSource, Writer
from simpletuner_gh200.cache.slots import FINITE, MOST_FULL, ORDINARY, Key, Range, Slot, key_of, source_words
from simpletuner_gh200.cache.tally import Statistics
from simpletuner_gh200.cache.watch import FolderWatch
from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import GIB

logger = logging.getLogger("simpletuner_gh200")

MISSING: Any = object()
"""What ``get`` returns on a miss: None is a value that can be cached."""

MOST_LAYOUTS = 4096
"""Layouts kept at hand. Caches have a few; one whose every entry carries its own text reads them from the segment."""

REMEMBER_FROM = 16 * 1024
"""Entries of at least this size are remembered by path, at some 400 bytes each: two percent of them at most."""

GROWTH = GIB
"""Size of a further segment. Address space, not memory: pages are taken as they are written."""


class Found:
    """An entry at hand: its slot, its layout, and the segment that maps its payload in this process."""

    __slots__ = ("address", "at", "check", "layout", "segment", "slot", "vouched_for")

    def __init__(self, slot: Slot, layout: Layout, segment: Segment) -> None:
        self.slot = slot
        self.layout = layout
        self.segment = segment
        self.address = segment.address + slot.offset
        """Where the published bytes are; they stay there as long as this object lives."""
        self.at, self.check = slot.at, slot.check
        self.vouched_for = False
        """The file was looked at after a watch on its folder began."""

    @property
    def finite(self) -> bool:
        return bool(self.slot.flags & FINITE)

    @property
    def payload(self) -> Bytes:
        """Published bytes; not to be written to."""
        return self.segment.bytes_at(self.slot.offset, self.slot.length)


def normal(path: Any) -> str:
    """The absolute path under which an entry is known, whatever form the caller uses."""
    text = path if type(path) is str else os.fsdecode(path)
    # Most are normal already, and asking the long way costs more than a lookup.
    if text[:1] == "/" and "//" not in text and "/." not in text and text[-1] != "/":
        return text
    return os.path.abspath(text)


def ordinary(path: str) -> int:
    """``ORDINARY`` for a file with one name that is no link, else 0."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    return ORDINARY if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else 0


def source_of(path: str) -> tuple[int, int] | None:
    """How the file looks now, in the words of a slot; None if it isn't there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return source_words(found.st_size, found.st_mtime_ns, found.st_ino)


class Table:
    """Safe from several threads. ``allowed`` is the budget in bytes of all ranks together; None: no limit."""

    def __init__(
        self,
        name: str,
        control: Control,
        *,
        allowed: int | None = None,
        look_for_nan: bool = False,
        slabs: SlabSource | None = None,
        growth: int = GROWTH,
    ) -> None:
        self.name = name
        self.control = control
        self.allowed = allowed
        self.look_for_nan = look_for_nan
        self.statistics = Statistics()
        self._slabs = slabs or HostSlabs()
        self._growth = growth
        self._segments: dict[int, Segment] = {}
        self._layouts: dict[int, Layout] = {}
        self._stored_layouts: dict[bytes, Range] = {}
        self._writer: tuple[int, Writer] | None = None
        self._seen_drops = control.drops
        self._opening = threading.Lock()
        self._watch = FolderWatch()
        self._watching = threading.Lock()
        self._memo: dict[str, Found] = {}

    # -- reading ---------------------------------------------------------------------------------------

    def find(self, path: str) -> Found | None:
        """The entry of a normal path, if it is held and its file is as it was when it was taken."""
        found = self._look_up(path)
        return found if found is not None and self._check(found, path) else None

    def find_all(self, paths: Sequence[str]) -> list[Found] | None:
        """Every normal path's entry, or None if one is missing. Counts nothing: the caller knows what became of it."""
        vouched = self._vouched()
        memo, words, entries = self._memo, self.control.words, []
        for path in paths:
            found = memo.get(path)
            if found is None or words[found.at] != found.check:
                found = self._look_up(path)
                if found is None:
                    return None
            if not (vouched and found.vouched_for) and not self._check(found, path):
                return None
            entries.append(found)
        return entries

    def _look_up(self, path: str) -> Found | None:
        """The entry that is published under ``path`` right now, whatever its file looks like."""
        found = self._memo.get(path)
        if found is not None:
            if self.control.words[found.at] == found.check:
                return found
            self._memo.pop(path, None)
        slot = self.control.slots.get(key_of(path))
        found = self._open(slot) if slot is not None else None
        if found is not None and found.slot.length >= REMEMBER_FROM:
            self._memo[path] = found
        return found

    def _vouched(self) -> bool:
        """Does the kernel vouch for files that were looked at before? Those that it named are looked at again."""
        with self._watching:
            if not self._watch.reliable:
                return False
            for path in self._watch.changed():
                found = self._look_up(path)
                if found is not None:
                    self._check(found, path, watched=True)
            return self._watch.reliable

    def _check(self, found: Found, path: str, *, watched: bool = False) -> bool:
        """Is the file as it was when its entry was taken? If not, the entry goes.

        The watch begins before the file is looked at, so whatever happens to it afterwards is an event.
        """
        slot = found.slot
        if not found.vouched_for and not watched and slot.flags & ORDINARY:
            with self._watching:
                watched = self._watch.covers(os.path.dirname(path))
        if source_of(path) != (slot.size_and_inode, slot.mtime_ns):
            self.statistics.stale.add()
            self.invalidate(path)
            return False
        found.vouched_for = found.vouched_for or bool(watched and slot.flags & ORDINARY)
        return True

    def get(self, path: Any) -> Any:
        """A fresh value the caller may do anything with, or MISSING."""
        found = self.find(normal(path))
        if found is None:
            self.statistics.misses.add()
            return MISSING
        self.statistics.hits.add()
        return self.value_of(found)

    def value_of(self, found: Found) -> Any:
        lent = found.segment.lend(found.slot.offset, found.slot.length)
        return found.layout.build(tensor_maker(found.payload.copy() if lent is None else lent))

    def published_at(self, address: int) -> tuple[Slab, int] | None:
        """Slab and offset of the published bytes behind a lent ``address``; None for memory that isn't lent."""
        for segment in list(self._segments.values()):
            offset = segment.lent_offset(address)
            if offset is not None:
                return segment.slab, offset
        return None

    def _open(self, slot: Slot) -> Found | None:
        number = slot.segment
        segment = self._segments.get(number) or self._map(number)
        layout = self._layouts.get(slot.layout) or self._read_layout(slot)
        if segment is None or layout is None:
            self.statistics.fall_back("segment of another rank is gone")
            return None
        return Found(slot, layout, segment)

    def _map(self, number: int) -> Segment | None:
        """Map a segment that another rank made, through its descriptor."""
        with self._opening:
            if number in self._segments:
                return self._segments[number]
            row = self.control.row(number)
            if row is None:
                return None
            segment = self._reach(row)
            if segment is not None:
                self._segments[number] = segment
            return segment

    def _reach(self, row: SegmentRow) -> Segment | None:
        try:
            fd = os.open(f"/proc/{row.pid}/fd/{row.fd}", (os.O_RDONLY if row.file else os.O_RDWR) | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_dev) != (row.inode, row.device):
                return None
            if row.file:
                return Segment.of_file(fd, row.size, label=self.name)
            return Segment(self._slabs.attach(fd, row.size, label=self.name))
        except MemoryRoomError:
            return None
        finally:
            os.close(fd)

    def _read_layout(self, slot: Slot) -> Layout | None:
        place = slot.layout_place
        segment = self._segments.get(place.segment) or self._map(place.segment)
        if segment is None:
            return None
        length = int.from_bytes(segment.bytes_at(place.offset, 8).tobytes(), "little")
        parsed = layouts.parse(segment.bytes_at(place.offset + 8, length).tobytes())
        if len(self._layouts) < MOST_LAYOUTS:
            self._layouts[slot.layout] = parsed
        return parsed

    # -- writing ---------------------------------------------------------------------------------------

    def admits(self, key: Key) -> bool:
        """Is the key in the fixed subset that the budget holds?"""
        return key.high <= self.control.threshold

    def publish(self, path: str, record: Record, source: tuple[int, int]) -> bool:
        """Hold ``record`` as the content of ``path`` while the file looks like ``source``; False if it can't be."""
        key = key_of(path)
        reason = self._refusal(key, record)
        if reason is None:
            place = self._reserve(record)
            if place is None:
                reason = "over budget"
            else:
                writer, layout, payload = place
                writer.fill(payload.offset, record.pieces)
                flags = (FINITE if record.finite else 0) | ordinary(path)
                slot = Slot.of(payload, record.size, flags, source, layout)
                reason = None if self.enter(key, slot) else "index full"
        if reason is not None:
            self.statistics.fall_back(reason)
            return False
        self.statistics.published.add()
        return True

    def enter(self, key: Key, slot: Slot, *, adds: int = 0) -> bool:
        """Publish bytes that are in a listed segment; ``adds`` of them were not counted as held yet."""
        with self.control.writing():
            old = self.control.slots.remove(key)
            if old is not None:
                self._release(old)
            if self.control.keys >= self.control.slots.capacity * MOST_FULL or not self.control.slots.put(key, slot):
                return False
            self.control.keys += 1
            self.control.hold(adds)
            self.control.count_live(slot.segment, 1)
        return True

    def _refusal(self, key: Key, record: Record) -> str | None:
        if not self.admits(key):
            return "not in the subset that fits"
        return "empty" if record.size == 0 and not record.layout else None

    def _reserve(self, record: Record) -> tuple[Writer, Range, Range] | None:
        """Room for a record and, where it is new here, its layout; None where the budget has none."""
        with self.control.writing():
            self.sweep()
            known = self._stored_layouts.get(record.layout)
            needed = record.size + (0 if known else aligned(len(record.layout) + 8) + 64)
            if self.allowed is not None and self.control.held + needed > self.allowed:
                return None
            number, writer = self._writer_for(needed)
            before = writer.used
            layout = known or self._store_layout(number, writer, record.layout)
            payload = Range(number, writer.reserve(record.size))
            self.control.hold(writer.used - before)
            return writer, layout, payload

    def _store_layout(self, number: int, writer: Writer, text: bytes) -> Range:
        from numpy import frombuffer, uint8

        data = len(text).to_bytes(8, "little") + text
        place = Range(number, writer.reserve(len(data)))
        writer.fill(place.offset, [(0, frombuffer(data, uint8))])
        if len(self._stored_layouts) < MOST_LAYOUTS:
            self._stored_layouts[text] = place
        return place

    def _writer_for(self, needed: int) -> tuple[int, Writer]:
        if self._writer is None or not self._writer[1].room_for(needed):
            self.add_room(max(self._growth, needed + 4 * PAGE))
        assert self._writer is not None
        return self._writer

    def add_room(self, size: int) -> None:
        """Start a segment of ``size`` bytes for what this rank publishes from now on."""
        segment = Segment(self._slabs.make(size, label=self.name, shared=True))
        number = self.add_segment(segment)
        self._writer = number, Writer(segment.slab)

    def add_segment(self, segment: Segment, *, file: bool = False) -> int:
        """List a segment, so that this and other ranks find its bytes."""
        with self.control.writing():
            number = self.control.add_segment(segment.slab.fd, segment.slab.size, file=file)
            self._segments[number] = segment
        return number

    # -- withdrawing -----------------------------------------------------------------------------------

    def invalidate(self, path: Any) -> bool:
        """Withdraw one entry on every rank; True if there was one."""
        key = key_of(normal(path))
        if self.control.slots.get(key) is None:
            return False
        with self.control.writing():
            old = self.control.slots.remove(key)
            if old is not None:
                self._release(old)
        return old is not None

    def drop(self) -> None:
        """Withdraw everything on every rank; the memory goes back once nobody looks at it."""
        with self.control.writing():
            self.control.drop_all()
            self.sweep()

    def _release(self, slot: Slot) -> None:
        """An entry went. A segment without any goes too, unless it is still being written."""
        number = slot.segment
        if self.control.row(number) is None or self.control.count_live(number, -1):
            return
        row = self.control.row(number)
        if row is not None and row.pid == os.getpid() and (self._writer is None or self._writer[0] != number):
            kept = {place.segment for place in self._stored_layouts.values()}
            if number not in kept:
                self.control.drop_segment(number)

    def sweep(self) -> None:
        """Forget segments that are no longer listed."""
        if self._seen_drops == self.control.drops:
            return
        self._seen_drops = self.control.drops
        listed = {row.number for row in self.control.rows()}
        # Not closed: a reader in another thread may be on it. The mapping goes with the last reference.
        for number in [number for number in self._segments if number not in listed]:
            del self._segments[number]
        if self._writer is not None and self._writer[0] not in listed:
            self._writer = None
        self._layouts = {}
        self._memo = {}
        self._stored_layouts = {text: place for text, place in self._stored_layouts.items() if place.segment in listed}

    # -- the whole -------------------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[Key, Found]]:
        for key, slot in self.control.slots.entries():
            found = self._open(slot)
            if found is not None:
                yield key, found

    def populate(self) -> None:
        """Map this rank's own segments' pages now rather than fault by fault in the first epoch."""
        if self._writer is not None:
            number, writer = self._writer
            self._segments[number].populate(writer.used)

    def report(self) -> dict[str, Any]:
        count = sum(1 for _ in self.control.slots.entries())
        return self.statistics.report(entries=count, held=self.control.held)

    def close(self) -> None:
        """Every lookup misses from now on; memory goes with the last value that was handed out."""
        self._segments = {}
        self._memo = {}
        self._writer = None
        self._watch.close()
        self.control.close()
