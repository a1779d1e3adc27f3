"""Opening files whose names others may give to something else at any time: a device, a pipe, a folder, a socket.

Whoever reads one reads no more bytes than its size says: what grows as fast as it is read has no end.
"""

from __future__ import annotations

import errno
import os
import stat

OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Not to wait for whoever writes to a FIFO."""


class NotRegular(OSError):
    """There is something under that name, and it is no file."""

    def __init__(self, path: object) -> None:
        super().__init__(errno.EINVAL, "not a regular file", path)


def open_regular(path: str | bytes) -> int:
    """A descriptor to read from; OSError where the file can't be opened, NotRegular where it is none."""
    try:
        fd = os.open(path, OPEN_FLAGS)
    except OSError as refused:
        if refused.errno == errno.ENXIO:  # as sockets answer
            raise NotRegular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegular(path)
    return fd
