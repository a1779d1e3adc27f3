"""Cache files as we know them: by absolute path, and by what tells them from any other file of that name.

While a run lasts, size, time and inode do. Packs outlive that: caches are copied, restored from
archives that give every file the same time, made again with another VAE at the same size. So an ``Identity`` also has
the inode and the time of the last change, which no user can set, and the checksums that the file itself carries.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from simpletuner_gh200.held.segment import Segment
from simpletuner_gh200.held.tensor_files import look_at
from simpletuner_gh200.memory.regular_files import open_regular

SECOND_NS = 1_000_000_000

_ZIP_END = struct.Struct("<4s4H2LH")
_ZIP_TAIL = 4096
"""The directory of nearly every cache file is in so many bytes at its end."""
_MOST_DIRECTORY = 16 << 20
_CHUNK = 1 << 20
_KNOWN = np.dtype([("size", np.uint64), ("mtime_ns", np.int64), ("ctime_ns", np.int64), ("inode", np.uint64)])
"""Of an ``Identity``. Times may lie before 1970; some network file systems number inodes by hashes of 64 bits."""


Source = tuple[int, int, int]
"""Size, time and inode of a file."""


class Identity(NamedTuple):
    """A cache file at the time its content was taken."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    fingerprint: int
    """Of the checksums that the file carries; see ``fingerprint``."""


def normal(path: Any) -> str:
    """The absolute path under which an entry is known, whatever form the caller uses."""
    text = path if type(path) is str else os.fsdecode(path)
    # Most are normal already, and asking the long way costs more than a lookup.
    if text[:1] == "/" and "//" not in text and "/." not in text and text[-1] != "/":
        return text
    return os.path.abspath(text)


def identify(path: str, source: Source | None = None) -> Identity | None:
    """The identity of a file; None if it is another by now than the one that looked like ``source`` when taken."""
    try:
        fd = open_regular(path)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if source not in (None, (found.st_size, found.st_mtime_ns, found.st_ino)):
            return None
        words = found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
        return Identity(*words, fingerprint(fd, found.st_size))
    except OSError:
        return None
    finally:
        os.close(fd)


def identities(segment: Segment, rows: Iterable[int]) -> list[Identity]:
    return [Identity(*row[2:7]) for row in segment.rows[list(rows)].tolist()]


def is_still(path: str, known: Identity) -> bool:
    """Is a file the one with that identity?

    Where only inode or change time differ, as after a copy or a ``chmod``, the checksums in the file decide. They do
    too where the change time is in whole seconds, as in images that are made to come out alike.
    """
    try:
        found = os.stat(path)
    except OSError:
        return False
    if (found.st_size, found.st_mtime_ns) != known[:2] or not stat.S_ISREG(found.st_mode):
        return False
    if (found.st_ctime_ns, found.st_ino) == known[2:4] and found.st_ctime_ns % SECOND_NS != 0:
        return True
    now = identify(path)
    return now is not None and now[:2] == known[:2] and now.fingerprint == known.fingerprint


def recognise(entries: Sequence[tuple[str, Identity]]) -> list[bool]:
    """The same of many files, which are looked at in one go."""
    looks = look_at([path for path, _ in entries])
    known = np.array([identity[:4] for _, identity in entries], _KNOWN)
    untouched = looks["plain"].astype(bool) & (looks["ctime_ns"] % SECOND_NS != 0)
    for name in _KNOWN.names or ():
        untouched &= looks[name] == known[name].astype(np.uint64)
    return [same or is_still(*entry) for entry, same in zip(entries, untouched.tolist(), strict=True)]


def recognise_rows(segment: Segment, rows: Iterable[int]) -> list[bool]:
    """The same of entries of a pack."""
    rows = list(rows)
    return recognise(list(zip(map(segment.path, rows), identities(segment, rows), strict=True)))


def fingerprint(fd: int, size: int) -> int:
    """What tells the content from another of the same size, without reading all of it where the file helps.

    A ``.pt`` is a zip file, whose directory has the CRC-32 of every tensor. A gzipped one ends with the CRC-32 of all
    of it. Anything else is read.
    """
    start = max(size - _ZIP_TAIL, 0)
    tail = os.pread(fd, _ZIP_TAIL, start)
    directory = _zip_directory(fd, size, start, tail)
    if directory is not None:
        return xxhash.xxh3_64_intdigest(directory)
    head = os.pread(fd, 10, 0)
    if head.startswith(b"\x1f\x8b"):
        return xxhash.xxh3_64_intdigest(head + tail[-8:])
    digest = xxhash.xxh3_64()
    at = 0
    while chunk := os.pread(fd, min(_CHUNK, size - at), at):
        digest.update(chunk)
        at += len(chunk)
    return digest.intdigest()


def _zip_directory(fd: int, size: int, start: int, tail: bytes) -> bytes | None:
    """The central directory of a zip file without a comment; None for anything else, 4 GiB and more among it."""
    end = len(tail) - _ZIP_END.size
    if end < 0 or not tail.startswith(b"PK\x05\x06", end):
        return None
    *_, length, at, _comment = _ZIP_END.unpack_from(tail, end)
    if length == 0 or length > _MOST_DIRECTORY or at + length > size:
        return None
    directory = tail[at - start : at - start + length] if at >= start else os.pread(fd, length, at)
    return directory if len(directory) == length and directory.startswith(b"PK\x01\x02") else None
