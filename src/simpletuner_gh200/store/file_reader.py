"""Reading one file while others may be changing it: what comes back is one state of the file, or an error."""

from __future__ import annotations

import errno
import os

OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
ATTEMPTS = 3


class Unstable(Exception):
    """The file kept changing while it was read."""


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
            fd = os.open(path, OPEN_FLAGS)
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
