"""Anonymous shared memory: memfds, their seals, and read-only mappings of them.

A memfd has no name anywhere, so nothing can be left behind: the kernel frees it with the last descriptor or mapping.
"""

from __future__ import annotations

import fcntl
import mmap
import os

SIZE_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Content may change, the size may not: what a table written by several ranks carries."""

CONTENT_SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE
"""Nobody, the creator included, can change it any more. Refused by the kernel while a writable mapping lives."""


def create_memfd(label: str, size: int = 0) -> int:
    """A new memfd that may be sealed later. ``label`` only shows in this process's own /proc entries."""
    fd = os.memfd_create(f"gh200-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if size:
        os.ftruncate(fd, size)
    return fd


def seal(fd: int, seals: int = CONTENT_SEALS) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def is_sealed(fd: int, seals: int = CONTENT_SEALS) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals


def reopen(fd: int, flags: int = os.O_RDWR) -> int:
    """Another open file description of the same memory, with an offset and access mode of its own."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def map_readonly(fd: int) -> mmap.mmap | None:
    """All of ``fd`` mapped for reading; None where it is empty, since nothing can be mapped then."""
    size = os.fstat(fd).st_size
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) if size else None


def map_shared(fd: int) -> mmap.mmap | None:
    """All of ``fd`` mapped for reading and writing, seen by every process that maps it."""
    size = os.fstat(fd).st_size
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE) if size else None
