"""A pack: the entries of one cache in one file, with an index that is read at once and payloads that are read singly.

=====================  ==================================================================================
bytes                  content
=====================  ==================================================================================
0 .. 4095              header: magic ``GH200PCK``, schema, number of entries, where the index is, its size and
                       xxh3-64, the size of the file, the length of the maker's text, and the xxh3-64 of the header
                       before that field; then zeros
4096 .. index          payloads, and layouts (8 bytes of length, then JSON: see ``layout``); payloads of 256 KiB
                       and more start at a multiple of 4096, everything else at a multiple of 64
index .. end           the rows (``ROW``), one per entry, all of one size; the maker's text; the paths, UTF-8
=====================  ==================================================================================

All numbers are little-endian. The header is ``8s`` magic, ``u32`` schema, ``u32`` zero, then ``u64`` each; its own
checksum follows it as ``u64``. The maker's text is what of the run's configuration decided what the entries hold: a
run with another text does not take them. A pack is written beside its place, made read-only, and renamed when every
byte is on disk, so there is the old one or the new one, never half of one.

Schema 1 had neither maker nor identity. Its packs count as absent: they are made again, and removed then.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import xxhash

from simpletuner_gh200.cache.record import Bytes
from simpletuner_gh200.cache.segment import place
from simpletuner_gh200.cache.slots import Key, key_of
from simpletuner_gh200.cache.source import Identity
from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.memory.regular_files import OPEN_FLAGS

MAGIC = b"GH200PCK"
SCHEMA = 2
HEADER_SIZE = 4096
READ_ONLY = 0o400
_HEADER = struct.Struct("<8sIIQQQQQQ")
ROW = np.dtype(
    [
        *((name, "<u8") for name in ("key_low", "key_high", "size")),
        *((name, "<i8") for name in ("mtime_ns", "ctime_ns")),
        *((name, "<u8") for name in ("inode", "fingerprint", "offset", "length", "checksum")),
        *((name, "<u8") for name in ("layout_offset", "layout_checksum", "path_offset")),
        *((name, "<u4") for name in ("path_length", "flags")),
    ]
)
"""A row of the index. ``key_*`` are the halves of the path's key (``slots.key_of``), ``size`` to ``fingerprint`` the
identity of the source file, ``path_offset`` counts from the first path; flags: 1, every value is finite."""

_local = threading.local()


class DamagedPack(CacheError):
    """A pack that can't be believed; its entries are made again from SimpleTuner's own files."""


class OutdatedPack(DamagedPack):
    """A pack of an older schema: nothing is wrong with it, but nobody reads it any more."""


class UntrustedPack(CacheError):
    """A pack that someone else could have put there, or that a newer version wrote: neither read nor removed."""


class PackEntry(NamedTuple):
    """One row of the index."""

    path: str
    key: Key
    identity: Identity
    offset: int
    length: int
    checksum: int
    layout_offset: int
    layout_checksum: int
    flags: int


class Item(NamedTuple):
    """What goes into a pack: an entry's bytes, and the identity of its source."""

    path: str
    identity: Identity
    flags: int
    layout: bytes
    payload: Bytes


class PackWriter:
    """Writes payloads one after the other, then the index, then the header."""

    def __init__(self, file: BinaryIO, made_by: str) -> None:
        self._file = file
        self._made_by = made_by.encode("utf-8", "surrogateescape")
        self._end = HEADER_SIZE
        self._layouts: dict[bytes, int] = {}
        self._rows: list[tuple[int, ...]] = []
        self._paths = bytearray()
        file.write(bytes(HEADER_SIZE))

    def add(self, item: Item) -> None:
        layout_at = self._layouts.get(item.layout)
        if layout_at is None:
            layout_at = self._put(len(item.layout).to_bytes(8, "little") + item.layout)
            self._layouts[item.layout] = layout_at
        offset = self._put(item.payload)
        path = item.path.encode("utf-8", "surrogateescape")
        checksum = xxhash.xxh3_64_intdigest(item.payload)
        layout = (layout_at, xxhash.xxh3_64_intdigest(item.layout))
        where = (len(self._paths), len(path), item.flags)
        row = (*key_of(item.path), *item.identity, offset, item.payload.nbytes, checksum, *layout, *where)
        self._rows.append(row)
        self._paths += path

    def finish(self) -> int:
        """The rest of the file, each part on disk before the part that vouches for it. Returns the size."""
        index = np.array(self._rows, ROW).tobytes() + self._made_by + self._paths
        at = self._put(index)
        _to_disk(self._file)
        counts = (len(self._rows), at, len(index), xxhash.xxh3_64_intdigest(index), self._end, len(self._made_by))
        header = _HEADER.pack(MAGIC, SCHEMA, 0, *counts)
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


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_pack(folder: int, name: str, items: Iterable[Item], made_by: str) -> int:
    """Write ``name`` so that at every moment it is the old file, or absent, or complete. Returns its size.

    ``folder`` is a descriptor. What somebody may have put there to be written through is not opened.
    """
    beside = f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb", buffering=1 << 20) as file:
            if not is_ours(os.fstat(fd)):
                raise CacheError(
                    f"files that we make beside {name} are not ours afterwards (user {os.fstat(fd).st_uid})",
                    remedy="set cache_config.cache_dir to a folder on a file system that keeps our user",
                )
            writer = PackWriter(file, made_by)
            for item in items:
                writer.add(item)
            size = writer.finish()
            os.fchmod(fd, READ_ONLY)
        os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=folder)
        raise
    _sync_folder(folder)
    return size


def _sync_folder(folder: int) -> None:
    os.fsync(folder)


def is_ours(found: os.stat_result) -> bool:
    """Made by this user, or by root, who could do anything anyway."""
    return found.st_uid in (os.geteuid(), 0)


class Pack:
    """An open pack whose header and index were found whole. Payloads are checked one by one: see ``payload``."""

    def __init__(self, path: Path, *, folder: int | None = None) -> None:
        """``folder``: a descriptor of the folder that ``path`` is in, where that is open already."""
        name = path if folder is None else path.name
        self._use(path, os.open(name, OPEN_FLAGS | os.O_NOFOLLOW, dir_fd=folder))

    @classmethod
    def over(cls, fd: int) -> Pack:
        """A pack that is open. Takes over ``fd``."""
        pack = cls.__new__(cls)
        pack._use(Path(os.readlink(f"/proc/self/fd/{fd}")), fd)
        return pack

    def _use(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        self._layouts: dict[tuple[int, int], bytes] = {}
        try:
            found = os.fstat(self.fd)
            self._refuse_untrusted(found)
            self.size, self.inode = found.st_size, found.st_ino
            self.rows, self.made_by, self._paths = self._read_index()
        except BaseException:
            os.close(self.fd)
            raise

    def _refuse_untrusted(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedPack(f"{self.path} is not a regular file")
        if not is_ours(found):
            raise UntrustedPack(f"{self.path} belongs to user {found.st_uid}, not to us")
        if found.st_mode & 0o022:
            raise UntrustedPack(f"{self.path} can be written by others (mode {stat.S_IMODE(found.st_mode):o})")

    def _read_index(self) -> tuple[np.ndarray, str, bytes]:
        raw = os.pread(self.fd, _HEADER.size + 8, 0)
        if len(raw) < _HEADER.size + 8 or not raw.startswith(MAGIC):
            raise self._damaged("it has no pack header")
        _, schema, _, count, at, length, checksum, size, maker = _HEADER.unpack_from(raw)
        if schema > SCHEMA:
            raise UntrustedPack(
                f"{self.path} was written by a newer version (schema {schema}, this one reads {SCHEMA})"
            )
        if schema < SCHEMA:
            raise OutdatedPack(
                f"{self.path} was written by an older version (schema {schema}, this one reads {SCHEMA})"
            )
        if xxhash.xxh3_64_intdigest(raw[: _HEADER.size]) != int.from_bytes(raw[_HEADER.size :], "little"):
            raise self._damaged("the header's checksum is wrong")
        paths_at = count * ROW.itemsize + maker
        if size != self.size or at + length > size or paths_at > length:
            raise self._damaged(f"{self.size} bytes, the header says {size}")
        index = _read_whole(self.fd, length, at)
        if len(index) != length or xxhash.xxh3_64_intdigest(index) != checksum:
            raise self._damaged("the index's checksum is wrong")
        rows = np.frombuffer(index, ROW, count)
        made_by = index[paths_at - maker : paths_at].decode("utf-8", "surrogateescape")
        return rows, made_by, index[paths_at:]

    def __len__(self) -> int:
        return len(self.rows)

    def entries(self, first: int = 0, last: int | None = None) -> Iterator[PackEntry]:
        """Those from number ``first`` to before ``last``, in the order in which they lie in the file."""
        return map(self._entry, self.rows[first:last].tolist())

    def entry(self, number: int) -> PackEntry:
        return self._entry(self.rows[number].item())

    def _entry(self, row: tuple[int, ...]) -> PackEntry:
        low, high, *rest, offset, length, checksum, layout, layout_sum, at, size, flags = row
        path = self._paths[at : at + size].decode("utf-8", "surrogateescape")
        identity = Identity(*rest)
        return PackEntry(path, Key(low, high), identity, offset, length, checksum, layout, layout_sum, flags)

    def payload(self, entry: PackEntry) -> Bytes | None:
        """The entry's bytes, in memory of this thread that its next call uses again.

        None where they are not those that were written, or can't be read: what somebody does to the file, or the disk
        to itself, costs the entries that it hits.
        """
        buffer = hot_buffer(entry.length)
        whole = self.layout(entry) is not None and read_checked(self.fd, buffer, entry.offset, entry.checksum)
        return buffer if whole else None

    def layout(self, entry: PackEntry) -> bytes | None:
        """The layout's text; None if it is not what was written."""
        known = self._layouts.get((entry.layout_offset, entry.layout_checksum))
        if known is not None:
            return known
        text = read_layout(self.fd, entry.layout_offset, entry.layout_checksum, self.size)
        if text is not None:
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


def _read_whole(fd: int, length: int, at: int) -> bytes:
    """So many bytes, or what there is of them. One call gives 2 GiB at most: the index of ten million entries."""
    parts = []
    while length and (part := os.pread(fd, length, at)):
        parts.append(part)
        at, length = at + len(part), length - len(part)
    return b"".join(parts)


def read_layout(fd: int, offset: int, checksum: int, most: int) -> bytes | None:
    """The layout's text at ``offset``; None where it has another checksum, or can't be read."""
    try:
        length = int.from_bytes(os.pread(fd, 8, offset), "little")
        text = os.pread(fd, length, offset + 8) if length <= most else b""
    except OSError:
        return None
    return text if xxhash.xxh3_64_intdigest(text) == checksum else None


def read_checked(fd: int, buffer: Bytes, offset: int, checksum: int) -> bool:
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
    return xxhash.xxh3_64_intdigest(buffer) == checksum


def hot_buffer(size: int) -> Bytes:
    """One buffer per thread, so that what was read is still in the processor's cache when it is checked."""
    buffer: Bytes | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.nbytes < size:
        buffer = _local.buffer = np.empty(max(size, 1 << 20), np.uint8)
    return buffer[:size]
