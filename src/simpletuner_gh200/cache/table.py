"""One cache in memory: which files it holds, where their bytes are, and hits that are safe to write to.

>>> table = Table("vae-photos", Control.create(1000, label="vae", shared=False), allowed=None)
>>> table.publish(path, encode(value), source_of(path))
>>> value = table.get(path)            # MISSING, or what torch.load would return
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simpletuner_gh200.cache.control import NOTHING, Control, ForkedProcess
from simpletuner_gh200.cache.entries import Found, Put, Ready
from simpletuner_gh200.cache.lending import LEND_FROM
from simpletuner_gh200.cache.pack import Pack
from simpletuner_gh200.cache.pack_segment import DamagedEntry
from simpletuner_gh200.cache.record import Record, tensor_maker, tensor_on
from simpletuner_gh200.cache.segment import SlabSource
from simpletuner_gh200.cache.segments import GROWTH, Room, Segments
from simpletuner_gh200.cache.slots import (
    FINITE,
    MOST_FULL,
    OFFSET_BITS,
    ORDINARY,
    Key,
    Slot,
    key_of,
    place_words,
    row_words,
)
from simpletuner_gh200.cache.source import normal, ordinary, source_of
from simpletuner_gh200.cache.tally import Statistics
from simpletuner_gh200.cache.watch import FolderWatch
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")

MISSING: Any = object()
"""What ``get`` returns on a miss: None is a value that can be cached."""

DAMAGED = "damaged in its pack"

REMEMBER_FROM = 16 * 1024
"""Entries of at least this size are remembered by path, at some 400 bytes each: two percent of them at most."""


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
        copies: bool = False,
    ) -> None:
        """``copies``: entries of packs are copied into slabs when they are asked for; else read from the pack."""
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
        self._copies = copies
        self.damaged: set[str] = set()
        """Paths whose entries in packs turned out not to be what was written."""
        self.backing: Callable[[Table, str], bool] | None = None
        """Asked for what is not listed yet: lists it and says so, where it has it at hand (a pack)."""

    # -- reading ---------------------------------------------------------------------------------------

    def find(self, path: str, *, fetch: bool = True) -> Found | None:
        """The entry of a normal path, if it is held and its file is as it was when it was taken.

        ``fetch``: also one that is at hand in a pack and not listed yet. Who packs does without, and is no reader: what
        the ranks that have ended took with them is then just not packed.
        """
        found = self._memo.get(path)
        # Asked before the entry is looked at: what the kernel tells of may have withdrawn it.
        vouched = found is not None and found.vouched_for and self._vouched()
        found = self._look_up(path, counts=fetch) or (self._fetch(path) if fetch else None)
        if found is None or (vouched and found.vouched_for):
            return found
        return found if self._check(found, path) else None

    def _fetch(self, path: str) -> Found | None:
        backing = self.backing
        return self._look_up(path) if backing is not None and backing(self, path) else None

    def find_all(self, paths: Sequence[str]) -> list[Found] | None:
        """Every normal path's entry, or None if one is missing. Counts nothing: the caller knows what became of it."""
        vouched = self._vouched()
        known, words = list(map(self._memo.get, paths)), self.control.words
        for number, found in enumerate(known):
            if found is None or words[found.at] != found.check:
                known[number] = found = self._look_up(paths[number]) or self._fetch(paths[number])
                if found is None:
                    return None
            if not (vouched and found.vouched_for) and not self._check(found, paths[number]):
                return None
        return [found for found in known if found is not None]

    def hold_all(self) -> None:
        """Map what other ranks have made, while they are here: it then stays when they end."""
        for row in self.control.rows():
            self._segments.get(row.number)

    def _look_up(self, path: str, *, counts: bool = True) -> Found | None:
        """The entry that is published under ``path`` right now, whatever its file looks like."""
        found = self._memo.get(path)
        if found is not None:
            if self.control.words[found.at] == found.check:
                return found
            self._memo.pop(path, None)
        slot = self.control.slots.get(key_of(path))
        try:
            found = self._open(slot, counts=counts) if slot is not None else None
            if found is not None and found.address is None and self._copies and counts:
                found = self._copied(path, found)
        except DamagedEntry as damaged:
            self._lose(path, damaged)
            return None
        if found is not None and found.slot.length >= REMEMBER_FROM:
            self._memo[path] = found
        return found

    def _copied(self, path: str, found: Found) -> Found | None:
        """An entry that was in a pack, from now on in a slab; still there where the budget is full."""
        if self._full:
            return found
        slot = found.slot
        record = Record(found.layout.text, found.length, ((0, found.payload),), found.finite)
        if not self.publish(path, record, (slot.size_and_inode, slot.mtime_ns)):
            return found
        published = self.control.slots.get(key_of(path))
        return self._open(published, counts=True) if published is not None else None

    def _lose(self, path: str, damaged: DamagedEntry) -> None:
        """An entry of a pack is not what was written: it goes, and SimpleTuner's own file is read."""
        if not self.damaged:
            logger.warning(
                "gh200: cache %s: %s; entries like this are read from SimpleTuner's own files, and counted",
                self.name,
                damaged,
            )
        self.damaged.add(path)
        self.statistics.fall_back(DAMAGED)
        self._withdraw_here(key_of(path))

    def _vouched(self) -> bool:
        """Does the kernel vouch for files that were looked at before? Those that it named are looked at again."""
        with self._watching:
            if self._watch.quiet():
                return True
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
        try:
            value = MISSING if found is None else self.value_of(found)
        except DamagedEntry as damaged:
            self._lose(normal(path), damaged)
            value = MISSING
        (self.statistics.misses if value is MISSING else self.statistics.hits).add()
        return value

    def value_of(self, found: Found) -> Any:
        lent = found.segment.lend(found.offset, found.length) if found.length >= LEND_FROM else None
        data, single = found.copy() if lent is None else lent, found.layout.single
        return found.layout.build(tensor_maker(data)) if single is None else tensor_on(data, single, single.offset)

    def published_at(self, address: int) -> tuple[Slab, int] | None:
        """Slab and offset of the published bytes behind a lent ``address``; None for memory that isn't lent."""
        return self._segments.published_at(address)

    def _open(self, slot: Slot, *, counts: bool) -> Found | None:
        segment = self._segments.get(slot.segment)
        layout = self._segments.layout_of(slot)
        if segment is None or layout is None:
            if counts:
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

    def lacks(self, keys: np.ndarray) -> np.ndarray:
        """Of each key, a row of two words: is it admitted, and nothing held under it yet?"""
        lacking: np.ndarray = ~self.control.slots.hold(keys) & (keys[:, 1] <= np.uint64(self.control.threshold))
        return lacking

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
            return _why(refused)
        flags = (FINITE if record.finite else 0) | ordinary(path)
        slot = Slot.of(place.payload, record.size, flags, source, place.layout)
        return None if self._enter(key, slot) else "index full, or dropped meanwhile"

    def publish_many(self, ready: Ready, put: Put) -> int:
        """Hold a batch of entries; how many of them are. The lock is taken to find room for all, and to publish all."""
        count = len(ready.keys)
        admitted = np.flatnonzero(ready.keys[:, 1] <= np.uint64(self.control.threshold))
        if len(admitted) < count:
            self.statistics.fall_back("not in the subset that fits", count - len(admitted))
            ready = ready.only(admitted)
        try:
            rooms = self._rooms_for(ready)
            for room in rooms:
                put(room.writer, admitted[room.numbers], room.offsets)
        except (GH200Error, OSError) as refused:  # as for a single one: SimpleTuner has the files
            self.statistics.fall_back(_why(refused), len(admitted))
            return 0
        if not rooms:
            return 0
        rows = np.concatenate([ready.rows(room) for room in rooms])
        with self.control.writing():
            entered = self._enter_many(rows)
        self.statistics.published.add_many(entered)
        if entered < len(rows):
            self.statistics.fall_back("index full, or dropped meanwhile", len(rows) - entered)
        return entered

    def _enter_many(self, rows: np.ndarray) -> int:
        """Publish words of slots behind their keys; how many are. Callers hold the lock."""
        control = self.control
        segments = rows[:, 2] >> np.uint64(OFFSET_BITS)
        numbers = set(segments.tolist())
        if any(control.row(number) is None for number in numbers):
            return 0
        fresh = int(control.slots.capacity * MOST_FULL) - control.keys
        added, done = control.slots.put_many(rows, fresh)
        control.keys += added
        for number in numbers:
            control.count_live(number, int((segments[done] == number).sum()))
        others = rows[~done].tolist()
        return int(done.sum()) + sum(self._enter_locked(Key(*row[:2]), Slot(*row[2:])) for row in others)

    def publish_packed(self, pack: Pack, rows: np.ndarray, sources: np.ndarray, ordinary: np.ndarray) -> np.ndarray:
        """List entries where they lie in a pack, by rows of its index: which of them are.

        ``sources``: how their files look, two words each. ``ordinary``: the flag of each.
        """
        flags = rows["flags"].astype(np.uint64) & np.uint64(FINITE) | ordinary.astype(np.uint64)
        keys = np.column_stack((rows["key_low"], rows["key_high"]))
        try:
            with self.control.writing():
                self._sweep()
                number = self._segments.add_pack(pack)
                payload, length = row_words(number, rows["offset"], rows["length"], flags)
                layout = place_words(number, rows["layout_offset"])
                entered = self._enter_many(np.column_stack((keys, payload, length, sources, layout)))
        except (GH200Error, OSError) as refused:
            self.statistics.fall_back(_why(refused), len(rows))
            return np.zeros(len(rows), np.bool_)
        self.statistics.published.add_many(entered)
        return np.ones(len(rows), np.bool_) if entered == len(rows) else self.control.slots.hold(keys)

    def _rooms_for(self, ready: Ready) -> list[Room]:
        """Room for as many as the budget holds."""
        with self.control.writing():
            self._sweep()
            rooms = self._segments.reserve_many(ready.layouts, ready.kinds, ready.sizes, self.allowed)
        full = len(ready.keys) - sum(len(room.numbers) for room in rooms)
        if full:
            self._say_full()
            self.statistics.fall_back("over budget", full)
        return rooms

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
        """Withdraw one entry on every rank; True if there was one, and this process may.

        A forked one may not, and need not: its parent sees by the file itself that it is another.
        """
        key = key_of(normal(path))
        try:
            gone = [copy.withdraw(key) for copy in self._elsewhere if copy.slots.get(key) is not None]
        except ForkedProcess:
            return False
        return self._withdraw_here(key) or any(gone)

    def _withdraw_here(self, key: Key) -> bool:
        if self.control.slots.get(key) is None:
            return False
        try:
            with self.control.writing():
                old = self.control.slots.remove(key)
                if old is not None:
                    self._segments.release(old)
        except ForkedProcess:
            return False
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


def _why(refused: Exception) -> str:
    """What the statistics count an entry under that could not be held."""
    return "in a forked process" if isinstance(refused, ForkedProcess) else f"no memory: {type(refused).__name__}"
