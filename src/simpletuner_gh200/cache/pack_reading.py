"""Entries out of packs: many together while a cache is filled, or the one that is asked for before that got there.

Opening costs what the index costs: its checksum is checked, and nothing else is read. A payload is read, and checked,
when it is taken in; whether its source file is still the one that was packed is asked then too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import xxhash

from simpletuner_gh200.cache.entries import Ready
from simpletuner_gh200.cache.pack import Pack, PackEntry, hot_buffer
from simpletuner_gh200.cache.record import Bytes, Record
from simpletuner_gh200.cache.segment import Writer
from simpletuner_gh200.cache.slots import FINITE, Key, key_of
from simpletuner_gh200.cache.source import Seen
from simpletuner_gh200.cache.table import Table

SPAN_BYTES = 1 << 20
"""Of a pack that is read at once: entries lie one behind the other, and small ones are many."""
MOST_ENTRIES = 256

Source = tuple[int, int]
SourceOf = Callable[[PackEntry], Source | None]
"""The file behind an entry as it looks now, if it is the one that was packed."""


def stretches(pack: Pack) -> Iterator[tuple[int, int]]:
    """Numbers of neighbours that are read together, as (first, behind the last)."""
    starts, lengths = pack.rows["offset"].tolist(), pack.rows["length"].tolist()
    first = 0
    for at, start in enumerate(starts):
        if at > first and (start + lengths[at] - starts[first] > SPAN_BYTES or at - first >= MOST_ENTRIES):
            yield first, at
            first = at
    if first < len(starts):
        yield first, len(starts)


class Span:
    """The payloads of neighbouring entries, read at once where they are small, or where there is but one.

    Into memory of this thread that its next span uses again: fresh pages cost more than all the rest.
    """

    def __init__(self, pack: Pack, entries: Sequence[PackEntry]) -> None:
        self._pack = pack
        self._start = entries[0].offset
        size = entries[-1].offset + entries[-1].length - self._start
        self._bytes: Bytes | None = None
        if 0 <= size <= SPAN_BYTES or len(entries) == 1:
            self._bytes = hot_buffer(size)
            if not _read_into(pack.fd, self._bytes, self._start):
                self._bytes = None  # then each entry tells by itself

    def payload(self, entry: PackEntry) -> Bytes | None:
        """None where the bytes are not those that were written, or can't be read."""
        if self._bytes is None:
            found = self._pack.payload(entry)
            return None if found is None else found.copy()  # the next one is read to where this is
        start = entry.offset - self._start
        found = self._bytes[start : start + entry.length]
        return found if xxhash.xxh3_64_intdigest(found) == entry.checksum else None

    def between(self, start: int, end: int) -> Bytes | None:
        """That part of the pack, if it was read at once."""
        return None if self._bytes is None else self._bytes[start - self._start : end - self._start]


def _runs(starts: Sequence[int], offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Entries that lie in the segment as they do in the pack, as (first, last): they are written at once."""
    first = 0
    for at in range(1, len(starts) + 1):
        if at == len(starts) or starts[at] - starts[at - 1] != offsets[at] - offsets[at - 1]:
            yield first, at - 1
            first = at


def _read_into(fd: int, buffer: Bytes, offset: int) -> bool:
    got = 0
    try:
        while got < buffer.nbytes:
            more = os.preadv(fd, [buffer[got:]], offset + got)
            if more == 0:
                return False
            got += more
    except OSError:
        return False
    return True


def take_many(pack: Pack, entries: Sequence[PackEntry], seen: Sequence[Seen], table: Table) -> list[bool | None]:
    """Publish entries of one stretch whose files are as they were: whether each is held now, None for a damaged one."""
    if not entries:
        return []
    span = Span(pack, entries)
    ready: list[int] = []
    layouts: list[bytes] = []
    payloads: list[Bytes] = []
    starts: list[int] = []
    states: list[bool | None] = []
    for number, entry in enumerate(entries):
        payload, layout = span.payload(entry), pack.layout(entry)
        if payload is None or layout is None:
            states.append(None)
            continue
        ready.append(number)
        layouts.append(layout)
        payloads.append(payload)
        starts.append(entry.offset)
        states.append(True)

    def put(writer: Writer, numbers: np.ndarray, places: np.ndarray) -> None:
        which, offsets = numbers.tolist(), places.tolist()
        for first, last in _runs([starts[number] for number in which], offsets):
            whole = span.between(starts[which[first]], starts[which[last]] + payloads[which[last]].nbytes)
            if whole is not None:
                writer.fill(offsets[first], [(0, whole)])
                continue
            for at in range(first, last + 1):
                writer.fill(offsets[at], [(0, payloads[which[at]])])

    if not ready or table.publish_many(_columns(entries, seen, ready, layouts), put) == len(ready):
        return states
    return [
        state and table.control.slots.get(entry.key) is not None for entry, state in zip(entries, states, strict=True)
    ]


def _columns(entries: Sequence[PackEntry], seen: Sequence[Seen], which: list[int], layouts: list[bytes]) -> Ready:
    flags = [entries[at].flags & FINITE | seen[at].ordinary for at in which]
    different = {text: number for number, text in enumerate(dict.fromkeys(layouts))}
    return Ready(
        keys=np.array([entries[at].key for at in which], np.uint64),
        layouts=list(different),
        kinds=np.array([different[text] for text in layouts], np.intp),
        sizes=np.array([entries[at].length for at in which], np.uint64),
        flags=np.array(flags, np.uint64),
        sources=np.array([seen[at].source for at in which], np.uint64),
    )


class PackIndex:
    """The indexes of a cache's packs, newest first, for entries that are asked for one by one. Safe in threads."""

    def __init__(self, packs: Sequence[Pack], source_of: SourceOf) -> None:
        self._packs = [(pack, *_sorted(pack)) for pack in packs]
        self._source_of = source_of

    def __len__(self) -> int:
        return sum(len(pack) for pack, *_ in self._packs)

    def take(self, table: Table, path: str) -> bool:
        """Publish the entry of ``path``, if a pack has it and its file is the one that was packed."""
        key = key_of(path)
        if not table.admits(key):
            return False
        for pack, lows, order in self._packs:
            entry = _find(pack, lows, order, key, path)
            source = self._source_of(entry) if entry is not None else None
            if entry is None or source is None:
                continue
            payload, layout = pack.payload(entry), pack.layout(entry)
            if payload is not None and layout is not None:
                record = Record(layout, entry.length, ((0, payload),), bool(entry.flags & FINITE))
                return table.publish(path, record, source)
        return False

    def close(self) -> None:
        packs, self._packs = self._packs, []
        for pack, *_ in packs:
            pack.close()


def _sorted(pack: Pack) -> tuple[np.ndarray, np.ndarray]:
    lows = pack.rows["key_low"]
    order = np.argsort(lows, kind="stable")
    return lows[order], order


def _find(pack: Pack, lows: np.ndarray, order: np.ndarray, key: Key, path: str) -> PackEntry | None:
    at = int(np.searchsorted(lows, np.uint64(key.low)))
    while at < len(lows) and int(lows[at]) == key.low:
        entry = pack.entry(int(order[at]))
        if entry.key == key and entry.path == path:
            return entry
        at += 1
    return None
