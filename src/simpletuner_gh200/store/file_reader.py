"""Reading one file while others may be changing it: what comes back is one state of the file, or an error."""

from __future__ import annotations

import errno
import os
import time

import xxhash

from simpletuner_gh200.memory.regular_files import open_regular

ATTEMPTS = 3

RECENT_NS = 1_000_000_000
"""A file may have been changed this long before it was read, and still be changing. File times move in ticks of up to
10 ms, and only when a write begins: within them a file that is half written looks like one that holds still."""

SETTLE_SECONDS = 0.02
"""Until whoever changed a file at the last tick is done, if it was one write."""


class Unstable(Exception):
    """The file kept changing while it was read."""


def appearance(found: os.stat_result) -> tuple[int, ...]:
    """All by which a change of the file, or another file in its place, shows."""
    return found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_recent(found: os.stat_result) -> bool:
    """Was it changed so short a time ago that its times do not tell whether it holds still?"""
    return max(found.st_mtime_ns, found.st_ctime_ns) > time.time_ns() - RECENT_NS


def checksum_on_disk(path: bytes, size: int, buffer: memoryview, *, give_back: bool) -> int:
    """The xxh3-64 of a file that has ``size`` bytes, read through ``buffer``; Unstable where it has not, or changes."""
    digest, at = xxhash.xxh3_64(), 0
    fd = open_regular(path)
    try:
        before = os.fstat(fd)
        while at < before.st_size == size and (got := os.preadv(fd, [buffer[: size - at]], at)):
            digest.update(buffer[:got])
            at += got
        if give_back:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if at != size or appearance(os.stat(path)) != appearance(before):
            raise Unstable
    finally:
        os.close(fd)
    return int(digest.intdigest())


def read_small(fd: int, buffer: memoryview) -> int:
    """Read all of a file that is not what was expected into ``buffer``; its size, -1 where it does not fit."""
    for _attempt in range(ATTEMPTS):
        size = os.fstat(fd).st_size
        if size >= len(buffer):
            return -1
        if os.preadv(fd, [buffer[: size + 1]], 0) == size:
            return size
    raise Unstable


def read_ahead(paths: list[bytes]) -> None:
    """Ask the kernel to fetch these files; whatever goes wrong here shows when they are read."""
    for path in paths:
        try:
            fd = open_regular(path)
        except OSError:
            continue
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def is_cold(fd: int, buffer: memoryview) -> bool:
    """Has the file to come from the disk? No where its file system can't tell, as most network ones can't."""
    try:
        os.preadv(fd, [buffer[:1]], 0, os.RWF_NOWAIT)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False
