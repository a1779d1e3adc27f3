"""A segment: immutable bytes under keys, with their index. In memory a sealed memfd, on disk a pack: the same bytes.

>>> writer = SegmentWriter(create_memfd("latents"), rows=PLAIN)
>>> writer.put(key_of("/data/1.png"), b"...", size=3, form=0)
>>> writer.finish()                                # index and header; from here on nothing changes any more
>>> segment = Segment.in_memory(writer.fd)         # seals it, and takes it over; so do other ranks
>>> segment.bytes_at(int(segment.rows[0]["offset"]), 3)
>>> segment.keys()                                 # of its rows, in order; who looks for one has a ``shelf``

=====================  ==================================================================================
bytes                  content
=====================  ==================================================================================
0 .. 4095              header: magic ``GH200PCK``, schema, kind of rows, number of entries, where the index is, its
                       size and xxh3-64, the size of everything, the length of the maker's text, and the xxh3-64 of
                       the header before that field; then zeros
4096 .. index          payloads, and layouts (8 bytes of length, then text); each at a multiple of 64
index .. end           the rows, one per entry, all of one size; the maker's text; the paths, UTF-8
=====================  ==================================================================================

All numbers are little-endian. The header is ``8s`` magic, ``u32`` schema, ``u32`` kind, then ``u64`` each; its own
checksum follows it as ``u64``. The maker's text is what of the run's configuration decided what the entries hold.

What is in memory is mapped and has addresses. What is on disk is read through its descriptor, and checked at every
read: what somebody does to the file would end a process that touches a mapping of it (SIGBUS), or change bytes after
they were checked. The pages are the page cache's: there once for all ranks, jobs and restarts.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.memory.mapping import CONTENT_SEALS, SIZE_SEALS, is_sealed, seal
from simpletuner_gh200.memory.slab import Slab

if TYPE_CHECKING:
    from simpletuner_gh200.memory.allocate import SlabMaker

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Piece = bytes | bytearray | memoryview | Bytes

MAGIC = b"GH200PCK"
SCHEMA = 2
"""1 had neither maker nor identity."""
HEADER_SIZE = 4096
_HEADER = struct.Struct("<8sIIQQQQQQ")
ALIGNMENT = 64
"""Of payloads and layouts, so that any dtype can be viewed in place."""

_KEY = [("key_low", "<u8"), ("key_high", "<u8"), ("size", "<u8")]
_PLACE = [("offset", "<u8"), ("length", "<u8"), ("checksum", "<u8")]
_TIMES = [("mtime_ns", "<i8"), ("ctime_ns", "<i8"), ("inode", "<u8"), ("fingerprint", "<u8")]
_LAYOUT = [("layout_offset", "<u8"), ("layout_checksum", "<u8"), ("path_offset", "<u8"), ("path_length", "<u4")]
_LAST = [("flags", "<u2"), ("form", "<u2")]

TENSORS = np.dtype([*_KEY, *_TIMES, *_PLACE, *_LAYOUT, *_LAST])
"""Rows of cached values. ``size`` to ``fingerprint``: the identity of the source file. ``path_offset`` counts from the
first path."""
PLAIN = np.dtype([*_KEY, *_PLACE, *_LAST, ("unused", "<u4")])
"""Rows of bytes that have no layout. ``length``: as they are stored in ``form``; ``size``: of what they stand for."""
_KINDS = (TENSORS, PLAIN)
"""By the number in the header."""

FINITE = 1
"""Flag: every tensor was looked at and holds neither NaN nor infinity."""

_local = threading.local()


class DamagedSegment(CacheError):
    """One that can't be believed; its entries are made again from their sources."""


class UntrustedSegment(CacheError):
    """One that someone else could have put there, or that a newer version wrote: neither read nor removed."""


class DamagedEntry(CacheError):
    """What a pack holds is not what was written to it, or can't be read."""


class SegmentFull(Exception):
    """More than a writer's limit; ``needed`` is what would have been taken at least."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"{needed} bytes")
        self.needed = needed


def key_of(path: str | bytes) -> bytes:
    """The 16 bytes under which a file is held: with 10^6 files the chance that any two agree is 10^-27."""
    raw = path.encode("utf-8", "surrogateescape") if isinstance(path, str) else path
    return xxhash.xxh3_128_digest(raw)[::-1]


def keys_of(paths: Sequence[str]) -> np.ndarray:
    """The keys of many paths, as the two words of a row each."""
    return words_of_keys([key_of(path) for path in paths])


def words_of_keys(keys: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def checksum_of(data: Piece) -> int:
    return int(xxhash.xxh3_64_intdigest(data))


# -- writing -------------------------------------------------------------------------------------------------------


class SegmentWriter:
    """Appends to an empty file or memfd; ``fd`` stays the caller's. Claims are made under a lock, so that threads can
    write side by side: claim, write, and add the rows when their bytes are there.
    """

    def __init__(self, fd: int, *, rows: np.dtype[Any] = TENSORS, limit: int | None = None) -> None:
        self.fd = fd
        self.used = HEADER_SIZE
        self._dtype = rows
        self._limit = limit
        self._rows: list[np.ndarray] = []
        self._paths = bytearray()
        self._layouts: dict[bytes, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self.entries = 0

    def claim(self, sizes: np.ndarray | Sequence[int]) -> np.ndarray:
        """Offsets of fresh bytes, one behind the other; SegmentFull where they would go over the limit."""
        steps = -(-np.asarray(sizes, np.int64) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            end = self.used + int(steps.sum())
            if self._limit is not None and end > self._limit:
                raise SegmentFull(end)
            starts = self.used + np.cumsum(steps) - steps
            self.used = end
        return starts.astype(np.uint64)

    def write(self, offset: int, piece: Piece) -> None:
        """Through the descriptor, not a mapping: pages that are written whole needn't be cleared first."""
        view = memoryview(piece).cast("B")
        while view:
            written = os.pwrite(self.fd, view, offset)
            view, offset = view[written:], offset + written

    def layout_size(self, text: bytes) -> int:
        """Bytes that a layout will still take."""
        return 0 if text in self._layouts else aligned(len(text) + 8)

    def layout(self, text: bytes) -> tuple[int, int]:
        """Where a layout is, and its checksum; written once."""
        known = self._layouts.get(text)
        if known is None:
            data = len(text).to_bytes(8, "little") + text
            offset = int(self.claim([len(data)])[0])
            self.write(offset, data)
            known = self._layouts.setdefault(text, (offset, checksum_of(text)))
        return known

    def add(self, rows: np.ndarray, paths: Sequence[bytes] = ()) -> None:
        """Entries whose bytes are written. ``paths``: of their sources, where rows have some."""
        with self._lock:
            if paths:
                lengths = np.array([len(path) for path in paths], np.uint64)
                rows["path_length"] = lengths
                rows["path_offset"] = len(self._paths) + np.cumsum(lengths) - lengths
                self._paths += b"".join(paths)
            self._rows.append(rows)
            self.entries += len(rows)

    def put(self, key: bytes, payload: Piece, *, path: bytes = b"", layout: bytes | None = None, **fields: int) -> None:
        """One entry, with its checksum; ``fields``: whatever else its row has."""
        row = np.zeros(1, self._dtype)
        size = memoryview(payload).nbytes
        row["key_low"], row["key_high"] = words_of_keys([key])[0]
        row["offset"] = offset = self.claim([size])[0]
        row["length"], row["checksum"] = size, checksum_of(payload)
        for name, value in fields.items():
            row[name] = value
        if layout is not None:
            row["layout_offset"], row["layout_checksum"] = self.layout(layout)
        self.write(int(offset), payload)
        self.add(row, [path] if path else ())

    def finish(self, made_by: str = "") -> int:
        """The rest, each part on disk before the part that vouches for it. Returns the size of everything."""
        rows = np.concatenate(self._rows) if self._rows else np.zeros(0, self._dtype)
        maker = made_by.encode("utf-8", "surrogateescape")
        index = rows.tobytes() + maker + self._paths
        at, size = self.used, self.used + len(index)
        self.write(at, index)
        os.ftruncate(self.fd, size)
        os.fsync(self.fd)
        counts = (len(rows), at, len(index), checksum_of(index), size, len(maker))
        header = _HEADER.pack(MAGIC, SCHEMA, _KINDS.index(self._dtype), *counts)
        self.write(0, header + checksum_of(header).to_bytes(8, "little"))
        os.fsync(self.fd)
        return size


# -- reading -------------------------------------------------------------------------------------------------------


class Segment:
    """Whole, and never changed again. Readers need no lock; memory goes when nobody holds a view of it any more."""

    def __init__(self, fd: int, name: str, slab: Slab | None) -> None:
        self.fd, self.name, self.slab = fd, name, slab
        self._bytes = slab.array if slab is not None else None
        self.address = slab.address if slab is not None else None
        """Of the first byte; None for what is on disk."""
        self._layouts: dict[int, bytes] = {}
        self.size = os.fstat(fd).st_size
        self.held_bytes = 0
        """Of payloads and layouts."""
        self.rows, self.made_by, self._paths = self._read_index()

    @classmethod
    def in_memory(cls, fd: int, *, maker: SlabMaker | None = None, name: str = "held memory") -> Segment:
        """A finished memfd, of this rank or of another; takes ``fd`` over.

        Sealed, so that nobody can change it; where ``maker`` lets a device know of the memory, only against changes of
        its size, since the kernel pins nothing that it could not write to.
        """
        try:
            if not is_sealed(fd):  # where a device is to know of it, against changes of its size alone
                seal(fd, CONTENT_SEALS if maker is None else SIZE_SEALS)
            size = os.fstat(fd).st_size
            slab = Slab.attach(fd, size, label=name) if maker is None else maker.attach(fd, size, label=name)
        finally:
            os.close(fd)
        assert slab.fd is not None
        return cls(slab.fd, name, slab)

    @classmethod
    def on_disk(cls, path: Path, fd: int) -> Segment:
        """A pack; takes ``fd`` over. Raises DamagedSegment or UntrustedSegment."""
        try:
            _refuse_untrusted(path, os.fstat(fd))
            segment = cls(fd, str(path), None)
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(segment, os.close, fd)
        return segment

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_pack(self) -> bool:
        return self.slab is None

    # -- finding ---------------------------------------------------------------------------------------

    def keys(self) -> list[bytes]:
        """Of all rows."""
        words = np.column_stack((self.rows["key_low"], self.rows["key_high"]))
        found: list[bytes] = words.view("V16").ravel().tolist()
        return found

    def path(self, row: int) -> str:
        start, length = int(self.rows["path_offset"][row]), int(self.rows["path_length"][row])
        return str(self._paths[start : start + length], "utf-8", "surrogateescape")

    # -- bytes -----------------------------------------------------------------------------------------

    def bytes_at(self, offset: int, length: int) -> Bytes:
        """Bytes of one that is in memory: themselves, not to be written to."""
        assert self._bytes is not None
        return self._bytes[offset : offset + length]

    def payload(self, row: int) -> Bytes:
        """What is held: the bytes themselves in memory, else a copy that was checked. Raises DamagedEntry."""
        offset, length, _ = self._place(row)
        if self._bytes is not None:
            return self._bytes[offset : offset + length]
        made = np.empty(length, np.uint8)
        self.copy_into(made, row)
        return made

    def copy_into(self, target: Bytes, row: int, skip: int = 0) -> None:
        """As much as ``target`` holds of an entry, from ``skip`` on. On disk all of it is checked: DamagedEntry."""
        offset, length, checksum = self._place(row)
        if self._bytes is not None:
            target[:] = self._bytes[offset + skip : offset + skip + target.nbytes]
            return
        whole = target if target.nbytes == length else hot_buffer(length)
        if length and not _read_checked(self.fd, whole, offset, checksum):
            raise DamagedEntry(f"{self.name}: what is at byte {offset} is not what was written there")
        if whole is not target:
            target[:] = whole[skip : skip + target.nbytes]

    def layout(self, row: int) -> bytes:
        """The layout's text. Raises DamagedEntry."""
        offset = int(self.rows["layout_offset"][row])
        text = self._layouts.get(offset)
        if text is None:
            text = self._read_layout(offset, int(self.rows["layout_checksum"][row]))
            if len(self._layouts) < MOST_LAYOUTS:
                self._layouts[offset] = text
        return text

    def _place(self, row: int) -> tuple[int, int, int]:
        one = self.rows[row]
        return int(one["offset"]), int(one["length"]), int(one["checksum"])

    def _read_layout(self, offset: int, checksum: int) -> bytes:
        try:
            length = int.from_bytes(os.pread(self.fd, 8, offset), "little")
            text = os.pread(self.fd, length, offset + 8) if length <= self.size else b""
        except OSError:
            text = b""
        if checksum_of(text) != checksum:
            raise DamagedEntry(f"{self.name}: the layout at byte {offset} is not what was written there")
        return text

    def _read_index(self) -> tuple[np.ndarray, str, memoryview]:
        raw = os.pread(self.fd, _HEADER.size + 8, 0)
        if len(raw) < _HEADER.size + 8 or not raw.startswith(MAGIC):
            raise self._damaged("it has no header")
        _, schema, kind, count, at, length, checksum, size, maker = _HEADER.unpack_from(raw)
        if schema > SCHEMA or kind >= len(_KINDS):
            raise UntrustedSegment(f"{self.name} was written by a newer version (schema {schema}, kind {kind})")
        if schema < SCHEMA:
            raise self._damaged(f"an older version wrote it (schema {schema}, this one reads {SCHEMA})")
        if checksum_of(raw[: _HEADER.size]) != int.from_bytes(raw[_HEADER.size :], "little"):
            raise self._damaged("the header's checksum is wrong")
        paths_at = count * _KINDS[kind].itemsize + maker
        if size != self.size or at + length > size or paths_at > length:
            raise self._damaged(f"{self.size} bytes, the header says {size}")
        # In memory one copy serves all ranks.
        index = _read_whole(self.fd, length, at) if self._bytes is None else self._bytes[at : at + length].data
        if len(index) != length or checksum_of(index) != checksum:
            raise self._damaged("the index's checksum is wrong")
        rows = np.frombuffer(index, np.uint8)[: count * _KINDS[kind].itemsize].view(_KINDS[kind])
        self.held_bytes = at - HEADER_SIZE
        return rows, str(index[paths_at - maker : paths_at], "utf-8", "surrogateescape"), index[paths_at:]

    def _damaged(self, why: str) -> DamagedSegment:
        return DamagedSegment(f"{self.name} is damaged: {why}", remedy="delete it (gh200 cache drop); it is made again")


MOST_LAYOUTS = 4096
"""Kept at hand. Caches have a few; one whose every entry has its own reads them when they are asked for."""


def is_ours(found: os.stat_result) -> bool:
    """Made by this user, or by root, who could do anything anyway."""
    return found.st_uid in (os.geteuid(), 0)


def _refuse_untrusted(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedSegment(f"{path} is not a regular file")
    if not is_ours(found):
        raise UntrustedSegment(f"{path} belongs to user {found.st_uid}, not to us")
    if found.st_mode & 0o022:
        raise UntrustedSegment(f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o})")


def _read_whole(fd: int, length: int, at: int) -> memoryview:
    """So many bytes, or what there is of them, however many calls that takes."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(at)
        return memoryview(file.read(length))


def _read_checked(fd: int, buffer: Bytes, offset: int, checksum: int) -> bool:
    """Fill ``buffer`` from the file; False where there is less, it can't be read, or it has another checksum."""
    got = 0
    try:
        while got < buffer.nbytes:
            more = os.preadv(fd, [buffer[got:]], offset + got)
            if more == 0:
                return False
            got += more
    except OSError:
        return False
    return checksum_of(buffer) == checksum


def hot_buffer(size: int) -> Bytes:
    """One buffer per thread, so that what was read is still in the processor's cache when it is checked."""
    buffer: Bytes | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.nbytes < size:
        buffer = _local.buffer = np.empty(max(size, 1 << 20), np.uint8)
    return buffer[:size]
