"""All that is asked of the kernel about memory: memfds and their seals, mappings and who ends them, advice on pages.

A memfd has no name anywhere, so nothing can be left behind: the kernel frees it with the last descriptor or mapping.

``mmap.mmap`` unmaps before its weak references fire, too late to take a CUDA registration back first, and it refuses
to close while views live. A ``Region`` turns that around: views keep it alive, and when the last one goes its release
steps run in the order they were stacked, newest first. ``map_shared`` gives a plain ``mmap`` object, for memory that no
device knows of.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")

PAGE = os.sysconf("SC_PAGESIZE")

_PROT_READ, _PROT_WRITE = 0x1, 0x2
_MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

HUGE, MAP_NOW = 14, 22
"""Advice on pages (MADV_HUGEPAGE, MADV_POPULATE_READ): use huge pages, where the kernel gives them on request; map them
in one call instead of fault by fault."""

LARGE_PAGE = 64 * 1024
"""With pages of this size a huge page is 512 MiB: nothing of ours wants one."""

SIZE_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Content may change, the size may not: nobody can shrink it under its readers."""

CONTENT_SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE
"""Nobody, the creator included, can change it any more. Refused by the kernel while a writable mapping lives."""


class Region:
    """So many bytes at an address. The memory goes back when the last view of it is gone."""

    def __init__(self, address: int, size: int, release: Callable[[], None], *, readonly: bool = False) -> None:
        self.address = address
        self.size = size
        self._readonly = readonly
        self._releases = [release]
        # At interpreter exit the kernel and the driver take everything back, and the driver may be gone by then.
        weakref.finalize(self, _unwind, self._releases).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.address, self._readonly)}

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All bytes, zero-copy; the array keeps the region alive."""
        return np.asarray(self)

    def before_release(self, step: Callable[[], None]) -> None:
        """Run ``step`` before what is there to release now (a registration goes before its mapping)."""
        self._releases.append(step)


def _unwind(releases: list[Callable[[], None]]) -> None:
    """Newest first, and no further than the first failure: memory CUDA would not let go of must stay mapped.

    Runs wherever the last view happens to die, so a failure is logged: nobody is there to catch it.
    """
    while releases:
        try:
            releases[-1]()
        except MemoryRoomError as failed:
            logger.warning("gh200: memory could not be released, and is kept: %s", str(failed))
            return
        releases.pop()


def map_anonymous(size: int) -> Region:
    """Private anonymous memory; a forked child gets its own copy on write."""
    return _mapped(size, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)


def map_file(fd: int, size: int) -> Region:
    """Map a memfd: shared with everyone who maps it, read-only where it is sealed."""
    actual = os.fstat(fd).st_size
    if actual < size:
        raise MemoryRoomError(
            f"the shared memory behind descriptor {fd} holds {actual} bytes, {size} were to be mapped",
            remedy="attach with the size the creator used",
        )
    return _mapped(size, _MAP_SHARED, fd, readonly=bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE))


def create_memfd(label: str, size: int = 0, seals: int = 0) -> int:
    """A new memfd that may be sealed later. ``label`` only shows in this process's own /proc entries."""
    fd = os.memfd_create(f"gh200-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        seal(fd, seals)
    except OSError as refused:
        os.close(fd)
        raise MemoryRoomError(f"no shared memory of {format_bytes(size)}: {refused}") from refused
    return fd


def memfd_of(label: str, content: Any) -> int:
    """A new memfd with the bytes of ``content``, one at least.

    Written, not mapped and copied: that would be a page fault for each page, and costs twice as much.
    """
    left = memoryview(content)
    fd = create_memfd(label, max(len(left), 1))
    try:
        while len(left):
            left = left[os.write(fd, left) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(fd: int, seals: int = CONTENT_SEALS) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def is_sealed(fd: int) -> bool:
    """Are its seals final?"""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL)


def map_shared(fd: int) -> mmap.mmap | None:
    """All of ``fd`` mapped for reading and writing, seen by every process that maps it."""
    size = os.fstat(fd).st_size
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE) if size else None


def advise_pages(address: int, size: int, advice: int, _madvise: Callable[..., int] = _libc.madvise) -> bool:
    """Whole pages from ``address`` on; False where the kernel refused, which for a hint is no matter.

    The function is bound here: at the interpreter's exit module globals may be gone before the last caller is.
    """
    return _madvise(address, size, advice) == 0


def _mapped(size: int, flags: int, fd: int, *, readonly: bool = False) -> Region:
    if size <= 0:
        raise ValueError(f"a mapping needs at least one byte, {size} asked for")
    rights = _PROT_READ if readonly else _PROT_READ | _PROT_WRITE
    address = _libc.mmap(None, size, rights, flags, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise MemoryRoomError(
            f"the kernel refused to map {format_bytes(size)}: {os.strerror(code)}",
            remedy="lower the memory limit, or raise the container's",
        )
    # The function is bound here: module globals may be gone before the last view is.
    return Region(address, size, partial(_unmap, _libc.munmap, address, size), readonly=readonly)


def _unmap(unmap: Callable[[int, int], int], address: int, size: int) -> None:
    if unmap(address, size) != 0:
        raise MemoryRoomError(f"munmap of {format_bytes(size)} failed: {os.strerror(ctypes.get_errno())}")
