"""A pack: the entries of one cache in one file, laid out so that the file can be mapped and served as it is.

=====================  ==================================================================================
bytes                  content
=====================  ==================================================================================
0 .. 4095              header: magic ``GH200PCK``, schema, number of entries, where the index is, its size and
                       xxh3-64, the size of the file, and the xxh3-64 of the header before that field; then zeros
4096 .. index          payloads, and layouts (8 bytes of length, then JSON: see ``layout``); payloads of 256 KiB
                       and more start at a multiple of 4096, everything else at a multiple of 64
index .. end           per entry: size, mtime_ns of the source file; offset, length and xxh3-64 of the payload;
                       offset of the layout and xxh3-64 of its text; flags; length of the path; the path, UTF-8
=====================  ==================================================================================

All numbers are little-endian. The header is ``8s`` magic, ``u32`` schema, ``u32`` zero, then ``u64`` each; its own
checksum follows it as ``u64``. A row of the index is seven ``u64``, ``u16`` flags (1: every value is finite) and the
``u32`` length of the path. A pack is written beside its place and renamed into it when every byte is on disk, so
there is the old one or the new one, never half of one.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from simpletuner_gh200.cache.record import Bytes
from simpletuner_gh200.cache.segment import place
from simpletuner_gh200.errors import CacheError

MAGIC = b"GH200PCK"
SCHEMA = 1
HEADER_SIZE = 4096
_HEADER = struct.Struct("<8sIIQQQQQ")
_ROW = struct.Struct("<7QHI")
_CHUNK = 512 << 10
_local = threading.local()


class DamagedPack(CacheError):
    """A pack that can't be believed; its entries are made again from SimpleTuner's own files."""


@dataclass(frozen=True)
class PackEntry:
    """One row of the index."""

    path: str
    size: int
    mtime_ns: int
    offset: int
    length: int
    checksum: int
    layout_offset: int
    layout_checksum: int
    flags: int


@dataclass(frozen=True)
class Item:
    """What goes into a pack: an entry's bytes, and how its source looked."""

    path: str
    size: int
    mtime_ns: int
    flags: int
    layout: bytes
    payload: Bytes


class PackWriter:
    """Writes payloads one after the other, then the index, then the header."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = HEADER_SIZE
        self._layouts: dict[bytes, int] = {}
        self._rows: list[bytes] = []
        file.write(bytes(HEADER_SIZE))

    def add(self, item: Item) -> None:
        layout_at = self._layouts.get(item.layout)
        if layout_at is None:
            layout_at = self._put(len(item.layout).to_bytes(8, "little") + item.layout)
            self._layouts[item.layout] = layout_at
        offset = self._put(item.payload)
        path = item.path.encode("utf-8", "surrogateescape")
        self._rows.append(
            _ROW.pack(
                item.size,
                item.mtime_ns,
                offset,
                item.payload.nbytes,
                xxhash.xxh3_64_intdigest(item.payload),
                layout_at,
                xxhash.xxh3_64_intdigest(item.layout),
                item.flags,
                len(path),
            )
            + path
        )

    def finish(self) -> int:
        """The rest of the file, each part on disk before the part that vouches for it. Returns the size."""
        index = b"".join(self._rows)
        at = self._put(index)
        _to_disk(self._file)
        header = _HEADER.pack(
            MAGIC, SCHEMA, 0, len(self._rows), at, len(index), xxhash.xxh3_64_intdigest(index), self._end
        )
        self._file.seek(0)
        self._file.write(header + xxhash.xxh3_64_intdigest(header).to_bytes(8, "little"))
        _to_disk(self._file)
        return self._end

    def _put(self, data: bytes | Bytes) -> int:
        start = place(self._end, len(data))
        self._file.write(bytes(start - self._end))
        self._file.write(data)
        self._end = start + len(data)
        return start


def _hot_buffer() -> memoryview:
    """One small buffer per thread, so that what was read is still in the processor's cache when it is hashed."""
    if not hasattr(_local, "view"):
        _local.view = memoryview(bytearray(_CHUNK))
    view: memoryview = _local.view
    return view


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_pack(target: Path, items: Iterable[Item]) -> int:
    """Write ``target`` so that at every moment it is the old file, or absent, or complete. Returns its size."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb", buffering=1 << 20) as file:
            writer = PackWriter(file)
            for item in items:
                writer.add(item)
            size = writer.finish()
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)
    return size


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Pack:
    """An open pack whose header and index were found whole. Payloads are checked one by one: see ``check``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._layouts: dict[tuple[int, int], bytes] = {}
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(self.fd).st_size
            self.entries = tuple(self._read_index())
        except BaseException:
            os.close(self.fd)
            raise

    def _read_index(self) -> Iterator[PackEntry]:
        raw = os.pread(self.fd, _HEADER.size + 8, 0)
        if len(raw) < _HEADER.size + 8 or not raw.startswith(MAGIC):
            raise self._damaged("no header of a pack")
        _, schema, _, count, at, length, checksum, size = _HEADER.unpack_from(raw)
        if schema != SCHEMA:
            raise self._damaged(f"schema {schema}, this version reads {SCHEMA}")
        if xxhash.xxh3_64_intdigest(raw[: _HEADER.size]) != int.from_bytes(raw[_HEADER.size :], "little"):
            raise self._damaged("the header's checksum is wrong")
        if size != self.size or at + length > size:
            raise self._damaged(f"{self.size} bytes, the header says {size}")
        index = os.pread(self.fd, length, at)
        if len(index) != length or xxhash.xxh3_64_intdigest(index) != checksum:
            raise self._damaged("the index's checksum is wrong")
        return _rows(index, count)

    def check(self, entry: PackEntry) -> bool:
        """Are the payload's and the layout's bytes those that were written? Reads, and maps nothing."""
        if self.layout(entry) is None:
            return False
        digest = xxhash.xxh3_64()
        view = _hot_buffer()
        at, end = entry.offset, entry.offset + entry.length
        while at < end:
            got = os.preadv(self.fd, [view[: min(end - at, len(view))]], at)
            if got == 0:
                return False
            digest.update(view[:got])
            at += got
        return digest.intdigest() == entry.checksum

    def check_mapped(self, entry: PackEntry, payload: Bytes) -> bool:
        """The same for a pack that is mapped: no copy, and the pages are at hand for the first hits."""
        return self.layout(entry) is not None and xxhash.xxh3_64_intdigest(payload) == entry.checksum

    def layout(self, entry: PackEntry) -> bytes | None:
        """The layout's text; None if it is not what was written."""
        known = self._layouts.get((entry.layout_offset, entry.layout_checksum))
        if known is not None:
            return known
        length = int.from_bytes(os.pread(self.fd, 8, entry.layout_offset), "little")
        if length > self.size:
            return None
        text = os.pread(self.fd, length, entry.layout_offset + 8)
        if xxhash.xxh3_64_intdigest(text) != entry.layout_checksum:
            return None
        self._layouts[entry.layout_offset, entry.layout_checksum] = text
        return text

    def _damaged(self, why: str) -> DamagedPack:
        return DamagedPack(f"{self.path} is damaged: {why}", remedy="delete it (gh200 cache drop); it is made again")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rows(index: bytes, count: int) -> Iterator[PackEntry]:
    at = 0
    for _ in range(count):
        size, mtime_ns, offset, payload, checksum, layout, layout_checksum, flags, length = _ROW.unpack_from(index, at)
        at += _ROW.size
        path = index[at : at + length].decode("utf-8", "surrogateescape")
        at += length
        yield PackEntry(path, size, mtime_ns, offset, payload, checksum, layout, layout_checksum, flags)
