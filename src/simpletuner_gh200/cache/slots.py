"""The index: an open-addressing table of fixed-size slots in shared memory, read without a lock.

A slot is eight 64-bit words; the last is the exclusive or of the others, so a reader that meets a slot while it is
being written sees that the words don't belong together and takes it for a miss. A slot names a range of a segment;
those bytes never change once published, so a slot that was read whole can be used at leisure.
Writers must hold the table's lock (see ``table``); this file only knows words. Every store is the C library's, with
barriers: on a processor that reorders stores a reader could else see a slot before the bytes that it names.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from simpletuner_gh200.cache.native import library

WORDS = 8
SLOT_BYTES = WORDS * 8
_WORD = (1 << 64) - 1
_SEAL = 0x9E3779B97F4A7C15
"""Keeps an all-zero slot from looking valid."""

OFFSET_BITS = 40
_OFFSET_MASK = (1 << OFFSET_BITS) - 1
_UNIT = 64
"""Offsets are stored in units of this many bytes: 40 bits reach 64 TiB."""

_LENGTH_BITS = 56
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1
FINITE = 1
"""Flag: every tensor was looked at and holds neither NaN nor infinity."""
ORDINARY = 2
"""Flag: the file has one name and is no link, so a watch on its folder sees every change."""

MOST_FULL = 0.75
"""Share of used slots above which no new key is taken: probing stays short."""


class Key(NamedTuple):
    low: int
    high: int


def source_words(size: int, mtime_ns: int, inode: int) -> tuple[int, int]:
    """What a file looked like when its content was taken, as two words of a slot."""
    return (size & 0xFFFFFFFFFF) | (inode & 0xFFFFFF) << 40, mtime_ns & 0xFFFFFFFFFFFFFFFF


def many_source_words(sizes: np.ndarray, mtimes_ns: np.ndarray, inodes: np.ndarray) -> np.ndarray:
    """The same of many files, a row each."""
    low = (sizes & np.uint64(0xFFFFFFFFFF)) | (inodes & np.uint64(0xFFFFFF)) << np.uint64(40)
    return np.column_stack((low, mtimes_ns))


class Range(NamedTuple):
    """So many bytes of a segment."""

    segment: int
    offset: int


class Slot(NamedTuple):
    """A published entry, as its words: unpacked only where someone asks, since every hit reads one."""

    payload: int
    length_and_flags: int
    size_and_inode: int
    mtime_ns: int
    layout: int
    check: int = 0
    """The slot's last word: changes with anything in it."""
    at: int = -1
    """Where that word is; not stored."""

    @classmethod
    def of(cls, payload: Range, length: int, flags: int, source: tuple[int, int], layout: Range) -> Slot:
        return cls(pack(payload), length | flags << _LENGTH_BITS, *source, pack(layout))

    @property
    def segment(self) -> int:
        return self.payload >> OFFSET_BITS

    @property
    def offset(self) -> int:
        return (self.payload & _OFFSET_MASK) * _UNIT

    @property
    def length(self) -> int:
        return self.length_and_flags & _LENGTH_MASK

    @property
    def flags(self) -> int:
        return self.length_and_flags >> _LENGTH_BITS

    @property
    def layout_place(self) -> Range:
        return Range(self.layout >> OFFSET_BITS, (self.layout & _OFFSET_MASK) * _UNIT)


def key_of(path: str) -> Key:
    digest = xxhash.xxh3_128_intdigest(path.encode("utf-8", "surrogateescape"))
    return Key((digest & _WORD) or 1, digest >> 64)


def keys_of(paths: Sequence[str]) -> np.ndarray:
    """The keys of many paths, a row of two words each."""
    digests = b"".join([xxhash.xxh3_128_digest(path.encode("utf-8", "surrogateescape")) for path in paths])
    keys = np.frombuffer(digests, ">u8").reshape(-1, 2)[:, ::-1].astype(np.uint64)
    keys[keys[:, 0] == 0, 0] = 1
    return keys


def slots_for(entries: int) -> int:
    """A power of two with room for ``entries`` keys and then some."""
    needed = max(int(entries / MOST_FULL) + 1, 256)
    return 1 << (needed - 1).bit_length()


def pack(place: Range) -> int:
    """A place as one word of a slot."""
    return place.segment << OFFSET_BITS | place.offset // _UNIT


def place_words(segment: int, offsets: np.ndarray) -> np.ndarray:
    """Places in one segment, a word each."""
    words: np.ndarray = offsets // np.uint64(_UNIT) | np.uint64(segment << OFFSET_BITS)
    return words


def row_words(segment: int, offsets: np.ndarray, sizes: np.ndarray, flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The words for payload and length of many slots in one segment."""
    return place_words(segment, offsets), sizes | flags << np.uint64(_LENGTH_BITS)


class Slots:
    """The table over ``words``, a memoryview of unsigned 64-bit words whose length is a power of two times eight."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.capacity = len(words) // WORDS
        if self.capacity & (self.capacity - 1):
            raise ValueError(f"{self.capacity} slots: not a power of two")
        self._mask = self.capacity - 1
        self._last = len(words) - 1
        self._array = np.frombuffer(words, np.uint64)
        self._address = self._array.ctypes.data

    def get(self, key: Key) -> Slot | None:
        """The entry under ``key``; None if there is none, or none that can be trusted right now."""
        words, (low, high) = self._words, key
        start = (low & self._mask) * WORDS
        for _ in range(self.capacity):
            a, b, payload, length, size, mtime, layout, check = words[start : start + WORDS].tolist()
            if a == low and b == high:
                if payload and a ^ b ^ payload ^ length ^ size ^ mtime ^ layout ^ _SEAL == check:
                    return Slot(payload, length, size, mtime, layout, check, start + 7)
                return None
            if a == 0:
                return None
            start = (start + WORDS) & self._last
        return None

    def knows(self, key: Key) -> bool:
        """Does ``key`` have a slot, published or withdrawn?"""
        index = self._find(key)
        return index is not None and self._words[index * WORDS] == key.low

    def put(self, key: Key, slot: Slot) -> bool:
        """Publish; False if the table is full. True says nothing about whether the key was new: see ``used``."""
        index = self._find(key)
        if index is None:
            return False
        self._write(index, key, slot)
        return True

    def put_many(self, rows: np.ndarray, fresh: int) -> tuple[int, np.ndarray]:
        """Publish entries, at most ``fresh`` of them under keys that are new: how many were, and which are published.

        Each row: the key, and the words of its slot. What has something published under its key is left alone.
        """
        table, done = np.ascontiguousarray(rows, np.uint64), np.zeros(len(rows), np.bool_)
        added: int = library().gh200_enter_slots(
            self._address, self.capacity, table.ctypes.data, len(table), max(fresh, 0), done.ctypes.data
        )
        return added, done

    def hold(self, keys: np.ndarray) -> np.ndarray:
        """Of each key, a row of two words: is something published under it?"""
        held = np.zeros(len(keys), np.bool_)
        library().gh200_find_slots(self._address, self.capacity, keys.ctypes.data, len(keys), held.ctypes.data)
        return held

    def remove(self, key: Key) -> Slot | None:
        """Withdraw the entry under ``key``; the slot stays taken by that key. Returns what was there."""
        found = self.get(key)
        if found is not None:
            index = self._find(key)
            assert index is not None
            self._write(index, key, _NOTHING)
        return found

    def entries(self) -> Iterator[tuple[Key, Slot]]:
        """All entries, in no particular order; one that changes meanwhile may be missed."""
        for start in range(0, len(self._words), WORDS):
            low, high = self._words[start], self._words[start + 1]
            if low and (slot := self.get(Key(low, high))) is not None:
                yield Key(low, high), slot

    def _find(self, key: Key) -> int | None:
        """The slot that holds ``key``, or the empty one where it belongs."""
        index = key.low & self._mask
        for _ in range(self.capacity):
            start = index * WORDS
            if self._words[start] == 0 or (self._words[start], self._words[start + 1]) == key:
                return index
            index = (index + 1) & self._mask
        return None

    def _write(self, index: int, key: Key, fields: Slot) -> None:
        row = array("Q", (*key, *fields[:5]))
        library().gh200_write_slot(self._address, index, row.buffer_info()[0])


_NOTHING = Slot(0, 0, 0, 0, 0)
