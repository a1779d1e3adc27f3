"""One cache in memory: which files it holds, where their bytes are, and hits that are safe to write to.

>>> table = Table("vae-photos", Control.create(1000, label="vae", shared=False), allowed=None)
>>> table.publish(path, encode(value), source_of(path))
>>> value = table.get(path)            # MISSING, or what torch.load would return
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from simpletuner_gh200.cache.control import NOTHING, Control
from simpletuner_gh200.cache.layout import Layout
from simpletuner_gh200.cache.record import Bytes, Record, tensor_maker
from simpletuner_gh200.cache.segment import Segment, SlabSource, Writer
from simpletuner_gh200.cache.segments import GROWTH, Place, Segments
from simpletuner_gh200.cache.slots import FINITE, MOST_FULL, OFFSET_BITS, ORDINARY, Key, Slot, key_of
from simpletuner_gh200.cache.source import normal, ordinary, source_of
from simpletuner_gh200.cache.tally import Statistics
from simpletuner_gh200.cache.tensor_files import enter_slots, usable
from simpletuner_gh200.cache.watch import FolderWatch
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")

MISSING: Any = object()
"""What ``get`` returns on a miss: None is a value that can be cached."""

REMEMBER_FROM = 16 * 1024
"""Entries of at least this size are remembered by path, at some 400 bytes each: two percent of them at most."""


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


class Ready(NamedTuple):
    """An entry whose bytes are at hand, for publishing with others."""

    key: Key
    layout: bytes
    size: int
    flags: int
    source: tuple[int, int]


Put = Callable[[Writer, list[int], list[int]], None]
"""Writes the payloads of some entries, by their numbers, to their offsets in a segment."""


class Table:
    """Safe from several threads. ``allowed`` is the budget in bytes of all ranks that share it; None: no limit.

    ``elsewhere``: other copies of the same cache on this node, from which whatever is withdrawn here goes too.
    """

    def __init__(
        self,
        name: str,
        control: Control,
        *,
        elsewhere: Sequence[Control] = (),
        allowed: int | None = None,
        look_for_nan: bool = False,
        slabs: SlabSource | None = None,
        growth: int = GROWTH,
        mappable: bool = True,
    ) -> None:
        self.name = name
        self.control = control
        self._elsewhere = tuple(elsewhere)
        self.allowed = allowed
        self.look_for_nan = look_for_nan
        self.statistics = Statistics()
        self._segments = Segments(name, control, slabs, growth, mappable=mappable)
        self._watch = FolderWatch()
        self._watching = threading.Lock()
        self._memo: dict[str, Found] = {}
        self._full = False
        self.backing: Callable[[Table, str], bool] | None = None
        """Asked for what is not held yet: publishes it and says so, where it has it at hand (a pack)."""

    # -- reading ---------------------------------------------------------------------------------------

    def find(self, path: str, *, fetch: bool = True) -> Found | None:
        """The entry of a normal path, if it is held and its file is as it was when it was taken.

        ``fetch``: also one that is at hand in a pack, which is held from then on.
        """
        found = self._look_up(path) or (self._fetch(path) if fetch else None)
        return found if found is not None and self._check(found, path) else None

    def _fetch(self, path: str) -> Found | None:
        backing = self.backing
        return self._look_up(path) if backing is not None and backing(self, path) else None

    def find_all(self, paths: Sequence[str]) -> list[Found] | None:
        """Every normal path's entry, or None if one is missing. Counts nothing: the caller knows what became of it."""
        vouched = self._vouched()
        memo, words, entries = self._memo, self.control.words, []
        for path in paths:
            found = memo.get(path)
            if found is None or words[found.at] != found.check:
                found = self._look_up(path) or self._fetch(path)
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
            self._withdraw_here(key_of(path))  # another copy may have the new content already
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
        return self._segments.published_at(address)

    def _open(self, slot: Slot) -> Found | None:
        segment = self._segments.get(slot.segment)
        layout = self._segments.layout_of(slot)
        if segment is None or layout is None:
            self.statistics.fall_back("segment of another rank is gone")
            return None
        return Found(slot, layout, segment)

    # -- writing ---------------------------------------------------------------------------------------

    def set_threshold(self, value: int) -> None:
        """Which keys are admitted, in every copy."""
        for control in (self.control, *self._elsewhere):
            control.threshold = value

    def admits(self, key: Key) -> bool:
        """Is the key in the fixed subset that the budget holds?"""
        return key.high <= self.control.threshold

    def publish(self, path: str, record: Record, source: tuple[int, int]) -> bool:
        """Hold ``record`` as the content of ``path`` while the file looks like ``source``; False if it can't be."""
        refusal = self._try_to_publish(path, record, source)
        if refusal is not None:
            self.statistics.fall_back(refusal)
            return False
        self.statistics.published.add()
        return True

    def _try_to_publish(self, path: str, record: Record, source: tuple[int, int]) -> str | None:
        key = key_of(path)
        if not self.admits(key):
            return "not in the subset that fits"
        try:
            with self.control.writing():
                self._sweep()
                place = self._segments.reserve(record.layout, record.size, self.allowed)
            if place is None:
                self._say_full()
                return "over budget"
            # Without the lock: nobody knows of these bytes until they are entered.
            place.writer.fill(place.payload.offset, record.pieces)
        except (GH200Error, OSError) as refused:  # SimpleTuner has the value: a run does not end for want of a copy
            return f"no memory: {type(refused).__name__}"
        flags = (FINITE if record.finite else 0) | ordinary(path)
        slot = Slot.of(place.payload, record.size, flags, source, place.layout)
        return None if self._enter(key, slot) else "index full, or dropped meanwhile"

    def publish_many(self, ready: Sequence[Ready], put: Put) -> int:
        """Hold a batch of entries; how many of them are. The lock is taken to find room for all, and to publish all."""
        try:
            places = self._places_for(ready)
            for writer, numbers in _by_writer(places):
                put(writer, numbers, [places[number].payload.offset for number in numbers])
        except (GH200Error, OSError) as refused:  # as for a single one: SimpleTuner has the files
            self.statistics.fall_back(f"no memory: {type(refused).__name__}", len(ready))
            return 0
        rows = [
            (*ready[number].key, *Slot.of(place.payload, *ready[number][2:], place.layout)[:5])
            for number, place in places.items()
        ]
        with self.control.writing():
            entered = self._enter_many(rows)
        self.statistics.published.add_many(entered)
        if entered < len(rows):
            self.statistics.fall_back("index full, or dropped meanwhile", len(rows) - entered)
        return entered

    def _enter_many(self, rows: Sequence[tuple[int, ...]]) -> int:
        """Publish words of slots behind their keys; how many are. Callers hold the lock."""
        library, control = usable(), self.control
        if library is None:
            return sum(self._enter_locked(Key(*row[:2]), Slot(*row[2:])) for row in rows)
        segments = Counter(row[2] >> OFFSET_BITS for row in rows)
        if any(control.row(number) is None for number in segments):
            return 0
        fresh = int(control.slots.capacity * MOST_FULL) - control.keys
        added, done = enter_slots(library, control.words, rows, fresh)
        control.keys += added
        for number, count in Counter(
            row[2] >> OFFSET_BITS for row, entered in zip(rows, done, strict=True) if entered
        ).items():
            control.count_live(number, count)
        others = (row for row, entered in zip(rows, done, strict=True) if not entered)
        return sum(done) + sum(self._enter_locked(Key(*row[:2]), Slot(*row[2:])) for row in others)

    def _places_for(self, ready: Sequence[Ready]) -> dict[int, Place]:
        """Room for as many as the budget holds, by their numbers."""
        with self.control.writing():
            self._sweep()
            inside = [number for number, entry in enumerate(ready) if self.admits(entry.key)]
            room = self._segments.reserve_many(
                [(ready[number].layout, ready[number].size) for number in inside], self.allowed
            )
            places = {number: place for number, place in zip(inside, room, strict=True) if place is not None}
        outside, full = len(ready) - len(inside), len(inside) - len(places)
        if outside:
            self.statistics.fall_back("not in the subset that fits", outside)
        if full:
            self._say_full()
            self.statistics.fall_back("over budget", full)
        return places

    def _say_full(self) -> None:
        if not self._full:
            self._full = True
            logger.warning(
                "gh200: cache %s: its budget of %s is full; further entries are read from disk at every use "
                "(cache_config.memory_limit_gb)",
                self.name,
                format_bytes(self.allowed or 0),
            )

    def _enter(self, key: Key, slot: Slot) -> bool:
        """Publish bytes that are in a listed segment."""
        with self.control.writing():
            return self._enter_locked(key, slot)

    def _enter_locked(self, key: Key, slot: Slot) -> bool:
        if self.control.row(slot.segment) is None:
            return False
        old = self.control.slots.remove(key)
        if old is not None:
            self._segments.release(old)
        if not self.control.slots.knows(key):
            if self.control.keys >= self.control.slots.capacity * MOST_FULL:
                return False
            self.control.keys += 1
        self.control.slots.put(key, slot)
        self.control.count_live(slot.segment, 1)
        return True

    # -- withdrawing -----------------------------------------------------------------------------------

    def invalidate(self, path: Any) -> bool:
        """Withdraw one entry on every rank; True if there was one."""
        key = key_of(normal(path))
        gone = [copy.withdraw(key) for copy in self._elsewhere if copy.slots.get(key) is not None]
        return self._withdraw_here(key) or any(gone)

    def _withdraw_here(self, key: Key) -> bool:
        if self.control.slots.get(key) is None:
            return False
        with self.control.writing():
            old = self.control.slots.remove(key)
            if old is not None:
                self._segments.release(old)
        return old is not None

    def drop(self) -> None:
        """Withdraw everything on every rank; the memory goes back once nobody looks at it."""
        for copy in self._elsewhere:
            with copy.writing():
                copy.drop_all()
        with self.control.writing():
            self.control.drop_all()
            self._sweep()

    def give_back(self) -> None:
        """Withdraw everything and take nothing in any more, on every rank, until the run ends."""
        self.set_threshold(NOTHING)
        self.drop()

    def _sweep(self) -> None:
        if self._segments.sweep():
            self._memo = {}

    # -- the whole -------------------------------------------------------------------------------------

    def populate(self) -> None:
        """Map this rank's own pages now rather than fault by fault in the first epoch."""
        self._segments.populate()

    def report(self) -> dict[str, Any]:
        count = sum(1 for _ in self.control.slots.entries())
        return self.statistics.report(entries=count, held=self.control.held)

    def close(self) -> None:
        """Every lookup misses from now on; memory goes with the last value that was handed out."""
        self._segments.close()
        self._memo = {}
        self._watch.close()
        for control in (self.control, *self._elsewhere):
            control.close()


def _by_writer(places: Mapping[int, Place]) -> list[tuple[Writer, list[int]]]:
    """Numbers of entries by the segment that they go to: mostly one, two where a new one was begun."""
    groups: dict[int, tuple[Writer, list[int]]] = {}
    for number, place in places.items():
        groups.setdefault(place.payload.segment, (place.writer, []))[1].append(number)
    return list(groups.values())
