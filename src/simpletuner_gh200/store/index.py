"""Where each file is: an open-addressing table on the 128-bit hash of its path, in memory that all ranks share.

The two 64-bit halves of the hash stand for the path, so no names are kept: with 10^6 files the chance that any two
agree is 10^-27. One row per file, 57 bytes, plus four bytes per slot.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from simpletuner_gh200.memory.mapping import create_memfd, map_readonly, map_shared, seal

COLUMNS = (
    ("key_low", np.uint64),
    ("key_high", np.uint64),
    ("offset", np.uint64),
    ("stored", np.uint64),
    ("size", np.uint64),
    ("checksum", np.uint64),
    ("form", np.uint8),
)
"""In the order in which they lie in the shared memory. ``form``: codec number, plus CHUNKED."""

CHUNKED = 0x40
"""The stored bytes are a table of ``CHUNK_ENTRY``: where each piece of the file lies."""

CHUNK_ENTRY = np.dtype([("offset", "<u8"), ("stored", "<u8")])

ABSENT = 0xFF
"""``form`` of a file that was found but not staged: it is read from disk."""

_HALVES = struct.Struct("<QQ")


def halves(path: bytes) -> tuple[int, int]:
    """The key of a path."""
    low, high = _HALVES.unpack(xxhash.xxh3_128_digest(path))
    return low, high


class Rows:
    """The columns, one row per file; as writable arrays while staging, as views of shared memory afterwards."""

    def __init__(self, count: int, columns: dict[str, np.ndarray]) -> None:
        self.count = count
        # Indexing a memoryview is several times faster than indexing an array, and gives plain ints.
        self.key_low, self.key_high, self.offset, self.stored, self.size, self.checksum, self.form = (
            memoryview(columns[name]) for name, _kind in COLUMNS
        )
        self.columns = columns

    @classmethod
    def new(cls, count: int) -> Rows:
        rows = cls(count, {name: np.zeros(count, kind) for name, kind in COLUMNS})
        rows.columns["form"][:] = ABSENT
        return rows

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())


def place(key_low: np.ndarray) -> np.ndarray:
    """Slots for these keys: row number + 1, 0 where free. At most half full, so that probing stays short."""
    count = len(key_low)
    size = 1 << max(2 * count - 1, 1).bit_length()
    mask = np.uint64(size - 1)
    slots = np.zeros(size, np.uint32)
    waiting = np.arange(count, dtype=np.uint32)
    wanted = (key_low & mask).astype(np.int64)
    while len(waiting):
        free = slots[wanted] == 0
        # Where several want one free slot, the assignment keeps the last; whoever lost moves on with the others.
        slots[wanted[free]] = waiting[free] + np.uint32(1)
        lost = slots[wanted] != waiting + np.uint32(1)
        waiting, wanted = waiting[lost], (wanted[lost] + 1) & (size - 1)
    return slots


@dataclass(frozen=True)
class IndexLayout:
    """Where the parts of an index lie in its memory; follows from the number of rows alone."""

    rows: int

    @property
    def slots(self) -> int:
        return 1 << max(2 * self.rows - 1, 1).bit_length()

    def parts(self) -> dict[str, tuple[int, np.dtype, int]]:
        """name -> (offset, type, length)."""
        at, found = 0, {}
        for name, kind, length in (("slots", np.uint32, self.slots), *((n, k, self.rows) for n, k in COLUMNS)):
            found[name] = (at, np.dtype(kind), length)
            at += -(-length * np.dtype(kind).itemsize // 64) * 64
        return found

    @property
    def nbytes(self) -> int:
        at, kind, length = self.parts()["form"]
        return at + max(length * kind.itemsize, 1)


def write_index(rows: Rows) -> int:
    """The index of ``rows`` in a sealed memfd."""
    layout = IndexLayout(rows.count)
    fd = create_memfd("index", layout.nbytes)
    arrays = _arrays(map_shared(fd), layout)
    arrays["slots"][:] = place(rows.columns["key_low"])
    for name, _kind in COLUMNS:
        arrays[name][:] = rows.columns[name]
    arrays.clear()  # the mapping goes with them: it could not be sealed before
    seal(fd)
    return fd


class Index:
    """Looks paths up. Made from the descriptor of ``write_index``, in any process."""

    find: Callable[[bytes], int]
    """Row of a path, -1 where it is not known."""

    def __init__(self, fd: int, count: int) -> None:
        layout = IndexLayout(count)
        arrays = _arrays(map_readonly(fd), layout)
        self.rows = Rows(count, {name: arrays[name] for name, _kind in COLUMNS})
        self.find = _finder(memoryview(arrays["slots"]), layout.slots - 1, self.rows)


def _finder(slots: memoryview, mask: int, rows: Rows) -> Callable[[bytes], int]:
    """A closure, since every read passes through here and a local name costs a fraction of an attribute."""
    key_low, key_high = rows.key_low, rows.key_high
    digest, unpack = xxhash.xxh3_128_digest, _HALVES.unpack

    def find(path: bytes) -> int:
        low, high = unpack(digest(path))
        slot = low & mask
        while row := slots[slot]:
            row -= 1
            if key_low[row] == low and key_high[row] == high:
                return row  # type: ignore[no-any-return]
            slot = (slot + 1) & mask
        return -1

    return find


def _arrays(memory: mmap.mmap | None, layout: IndexLayout) -> dict[str, np.ndarray]:
    assert memory is not None  # even an index of nothing has a few bytes
    return {
        name: np.frombuffer(memory, kind, length, at) if length else np.empty(0, kind)
        for name, (at, kind, length) in layout.parts().items()
    }
