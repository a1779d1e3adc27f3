"""Batches of ``.pt`` files taken apart without the interpreter lock.

In a cache thousands of files carry the same pickle. It is understood once, by torch's own safe loader: the file is
loaded from a mapping, so that where each tensor's bytes lie tells which part of which storage they are. Every other
file with that very pickle is then taken apart by those places.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simpletuner_gh200.held import bulk
from simpletuner_gh200.held.bulk import FILE_FIELDS, NO_ROOM, REFUSED, UNKNOWN, inflating_library
from simpletuner_gh200.held.record import EXPONENTS, Record, Unrepresentable, encode, parse
from simpletuner_gh200.memory.mapping import create_memfd

logger = logging.getLogger("simpletuner_gh200")

MOST_STORAGES = 64
MOST_SHAPES = 256
"""Pickles that are remembered. A cache whose every file has its own goes the old way."""

BUFFER_BYTES = 768 << 10
"""Of inflated files at a time: they stay in the processor's cache until they are written out."""
SCRATCH_BYTES = 1 << 20
"""For what is gzipped, and for the state of whoever inflates it."""
MOST_FILES = 256
"""Of a batch."""
LARGEST_BYTES = 64 << 20
"""Larger files are read one by one: what a batch saves is nothing beside them."""

_LEAF = np.dtype([(name, np.uint64) for name in ("storage", "start", "size", "at", "word", "exponent")])
TENSOR_FILE = np.dtype(
    [
        *FILE_FIELDS,
        *((name, np.uint64) for name in ("shape", "pickle", "pickle_size", "finite")),
        ("storages", np.uint64, MOST_STORAGES),
    ]
)


class _Shape(ctypes.Structure):
    _fields_ = (
        *(("pickle", ctypes.c_void_p), ("pickle_size", ctypes.c_uint64)),
        *(("leaves", ctypes.c_void_p), ("leaf_count", ctypes.c_uint64)),
        *(("storage_sizes", ctypes.c_void_p), ("storage_count", ctypes.c_uint64)),
        *(("payload_size", ctypes.c_uint64), ("refused", ctypes.c_uint64)),
    )


@dataclass(frozen=True)
class KnownPickle:
    """What every file with one pickle has in common."""

    pickle: bytes
    layout: bytes
    payload_size: int
    refusal: str | None = None
    """Why a value like this can't be held. The empty text: it can't be read here, and goes the old way."""


class Shapes:
    """The pickles that were understood so far. Safe in threads: what is there never moves or changes."""

    def __init__(self) -> None:
        self.known: list[KnownPickle] = []
        self.table = (_Shape * MOST_SHAPES)()
        self._kept: list[Any] = []
        self._lock = threading.Lock()

    def learn(self, content: bytes, pickle: bytes) -> bool:
        """Understand the pickle of a file that was found whole; False where no more are remembered."""
        with self._lock:
            if any(shape.pickle == pickle for shape in self.known):
                return True
            storages = _storages(content)
            if len(self.known) >= MOST_SHAPES or storages is None:
                return False
            refusal, record, places = _understand(content, storages)
            self._add(pickle, refusal, record, places, storages)
            return True

    def _add(self, pickle: bytes, refusal: str | None, record: Record | None, places: Any, storages: Any) -> None:
        sizes = np.array([size for _, size in storages], np.uint64)
        text = np.frombuffer(pickle, np.uint8)
        self._kept += [places, sizes, text]
        row = self.table[len(self.known)]
        row.pickle, row.pickle_size = text.ctypes.data, len(pickle)
        row.leaves, row.leaf_count = places.ctypes.data, len(places)
        row.storage_sizes, row.storage_count = sizes.ctypes.data, len(sizes)
        row.payload_size, row.refused = (record.size if record is not None else 0), int(refusal is not None)
        layout = record.layout if record is not None else b""
        self.known.append(KnownPickle(pickle, layout, record.size if record is not None else 0, refusal))


def _understand(content: bytes, storages: Sequence[tuple[int, int]]) -> tuple[str | None, Record | None, np.ndarray]:
    """(why not, the value taken apart, where its tensors lie) of a file's content."""
    import torch

    nowhere = np.zeros(0, _LEAF)
    fd = create_memfd("pickle")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        inode = os.fstat(fd).st_ino
        value = torch.load(f"/proc/self/fd/{fd}", map_location="cpu", weights_only=True, mmap=True)
        record = encode(value)
        places = _places(record, storages, inode)
    except Unrepresentable as odd:
        return odd.reason, None, nowhere
    except Exception as failed:  # noqa: BLE001 - torch says in many ways that it doesn't take a file; the old way tells
        logger.debug("gh200: a pickle is not understood: %s", failed)
        return "", None, nowhere
    finally:
        os.close(fd)
    return ("", None, nowhere) if places is None else (None, record, places)


def _places(record: Record, storages: Sequence[tuple[int, int]], inode: int) -> np.ndarray | None:
    """Of each tensor: which storage, from where in it; None where one does not lie in the mapped file."""
    leaves = parse(record.layout).leaves
    rows = []
    for leaf, (at, piece) in zip(leaves, record.pieces, strict=True):
        word, exponent = _finite_by(leaf.dtype)
        if not piece.nbytes:
            rows.append((0, 0, 0, at, word, exponent))
            continue
        place = _place_in_file(piece.__array_interface__["data"][0], inode)
        inside = [
            (number, place - start)
            for number, (start, size) in enumerate(storages)
            if place is not None and start <= place and place + piece.nbytes <= start + size
        ]
        if len(inside) != 1:
            return None
        rows.append((*inside[0], piece.nbytes, at, word, exponent))
    return np.array(rows, _LEAF)


def _finite_by(dtype: str) -> tuple[int, int]:
    import torch

    known = EXPONENTS.get(dtype)
    if known is not None:
        return np.dtype(known[0]).itemsize, known[1]
    return (0, 0) if getattr(torch, dtype).is_floating_point else (1, 0)


def _place_in_file(address: int, inode: int) -> int | None:
    """Which byte of the mapped file with that inode is at ``address``."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            where, _mode, offset, _device, found, *_ = line.split(maxsplit=5)
            first, _, last = where.partition("-")
            if int(first, 16) <= address < int(last, 16):
                return address - int(first, 16) + int(offset, 16) if int(found) == inode else None
    return None


class FileTaker:
    """Takes batches of files apart. For one thread: it owns its buffers."""

    def __init__(self, shapes: Shapes, *, look_for_nan: bool) -> None:
        library = inflating_library()
        self._take, self._put = library.gh200_take_files, library.gh200_put_payloads
        self._shapes = shapes
        self._look_for_nan = look_for_nan
        self._files = np.zeros(MOST_FILES, TENSOR_FILE)
        self._files_at = self._files.ctypes.data  # asking for an address costs more than some files do
        self.counts = (ctypes.c_uint64 * (REFUSED + 1))()
        """Of the last batch: how many files have each status."""
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)
        self._scratch_at = self._scratch.ctypes.data
        self._use_buffer(BUFFER_BYTES)

    def _use_buffer(self, size: int) -> None:
        self._buffer = np.empty(size, np.uint8)
        self._buffer_at = self._buffer.ctypes.data

    def take(self, paths: Sequence[str]) -> np.ndarray:
        """The first of ``paths``, as many as there is room for and at least one: a row each, good until the next call.

        Files whose pickle was new are looked at again once it is understood.
        """
        encoded = "\0".join(paths[:MOST_FILES]).encode("utf-8", "surrogateescape")
        wanted = min(len(paths), MOST_FILES)
        while wanted:
            count = self._take_once(encoded, wanted)
            files = self._files[:count]
            if self.counts[NO_ROOM] and self._make_room():
                continue
            if not self.counts[UNKNOWN] or not self._learn(files):
                return files
        return self._files[:0]

    def _take_once(self, encoded: bytes, count: int) -> int:
        done: int = self._take(
            *(encoded, count, self._buffer_at, self._buffer.nbytes, self._scratch_at, SCRATCH_BYTES),
            *(self._shapes.table, len(self._shapes.known), self._look_for_nan, self._files_at, self.counts),
        )
        return done

    def _make_room(self) -> bool:
        """For a file that is larger than all of the buffer; False where it is too large for a batch altogether."""
        needed = int(max(self._files["size"][0], self._files["content_size"][0])) + 1
        if not self._buffer.nbytes < needed <= LARGEST_BYTES:
            return False
        self._use_buffer(needed)
        return True

    def _learn(self, files: np.ndarray) -> bool:
        """Understand the pickles that weren't; True if there were some, so that it pays to look again."""
        learned = False
        for file in files[files["status"] == UNKNOWN]:
            start, size = int(file["content"]), int(file["content_size"])
            content = self._buffer[start : start + size].tobytes()
            pickle = content[int(file["pickle"]) : int(file["pickle"]) + int(file["pickle_size"])]
            learned |= self._shapes.learn(content, pickle)
        return learned

    def put(self, which: np.ndarray, offsets: np.ndarray, *, fd: int | None, address: int) -> None:
        """Write the payloads of taken files, by their number in the batch, to ``offsets`` of a segment."""
        numbers, places = which.astype(np.uint32), np.ascontiguousarray(offsets, np.uint64)
        refused = self._put(
            *(self._buffer_at, self._shapes.table, self._files_at),
            *(numbers.ctypes.data, places.ctypes.data, len(numbers)),
            *(-1 if fd is None else fd, address),
        )
        if refused:
            raise OSError(refused, os.strerror(refused))


def look_at(paths: Sequence[str]) -> np.ndarray:
    """How files look now: a row each."""
    return bulk.look_at([path.encode("utf-8", "surrogateescape") for path in paths])


def _storages(content: bytes) -> list[tuple[int, int]] | None:
    """(where its bytes begin, how many) of each storage of a zip file, by its number; None where one is missing."""
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found = {}
        for member in archive.infolist():
            _, slash, number = member.filename.partition("/data/")
            if slash and number.isdigit():
                local = content[member.header_offset : member.header_offset + 30]
                names = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
                found[int(number)] = (member.header_offset + 30 + names, member.file_size)
    return [found[at] for at in range(len(found))] if sorted(found) == list(range(len(found))) else None
