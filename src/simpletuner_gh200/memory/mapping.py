"""Address ranges and who frees them: anonymous or memfd mappings, and regions a driver handed out.

``mmap.mmap`` unmaps before its weak references fire, too late to take a CUDA registration back first, and it refuses
to close while views live. A ``Region`` turns that around: views keep it alive, and when the last one goes its release
steps run in the order they were stacked, newest first.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from simpletuner_gh200.errors import MemoryRoomError

logger = logging.getLogger("simpletuner_gh200")

PAGE = os.sysconf("SC_PAGESIZE")

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Region:
    """So many bytes at an address. The memory goes back when the last view of it is gone."""

    def __init__(self, address: int, size: int, release: Callable[[], None]) -> None:
        self.address = address
        self.size = size
        self._releases = [release]
        # At interpreter exit the kernel and the driver take everything back, and the driver may be gone by then.
        weakref.finalize(self, _unwind, self._releases).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.address, False)}

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All bytes, writable, zero-copy; the array keeps the region alive."""
        return np.asarray(self)

    def before_release(self, step: Callable[[], None]) -> None:
        """Run ``step`` before what is there to release now (a registration goes before its mapping)."""
        self._releases.append(step)

    def after_release(self, step: Callable[[], None]) -> None:
        """Run ``step`` when everything else is released (a budget gets its bytes back last)."""
        self._releases.insert(0, step)


def _unwind(releases: list[Callable[[], None]]) -> None:
    """Newest first, and no further than the first failure: memory CUDA would not let go of must stay mapped.

    Runs wherever the last view happens to die, so a failure is logged: nobody is there to catch it. What stays is
    still counted in its budget.
    """
    while releases:
        try:
            releases[-1]()
        except MemoryRoomError as failed:
            logger.warning("gh200: memory could not be given back, and is kept: %s", str(failed))
            return
        releases.pop()


def map_anonymous(size: int) -> Region:
    """Private anonymous memory; a forked child gets its own copy on write."""
    return _mapped(size, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)


def map_file(fd: int, size: int, *, private: bool = False) -> Region:
    """Map a memfd: shared with everyone who maps it, or ``private``, where writes stay with this mapping."""
    actual = os.fstat(fd).st_size
    if actual < size:
        raise MemoryRoomError(
            f"the shared memory behind descriptor {fd} holds {actual} bytes, {size} were to be mapped",
            remedy="attach with the size the creator used",
        )
    return _mapped(size, _MAP_PRIVATE | _MAP_NORESERVE if private else _MAP_SHARED, fd)


def create_memfd(name: str, size: int) -> int:
    """An anonymous file of exactly ``size`` bytes that nobody can shrink under its readers."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as refused:
        os.close(fd)
        raise MemoryRoomError(f"no shared memory of {size} bytes: {refused}") from refused
    return fd


def _mapped(size: int, flags: int, fd: int) -> Region:
    if size <= 0:
        raise ValueError(f"a mapping needs at least one byte, {size} asked for")
    address = _libc.mmap(None, size, _PROT_READ_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise MemoryRoomError(
            f"the kernel refused to map {size} bytes: {os.strerror(code)}",
            remedy="lower the memory limit, or raise the container's",
        )
    # The function is bound here: module globals may be gone before the last view is.
    return Region(address, size, partial(_unmap, _libc.munmap, address, size))


def _unmap(unmap: Callable[[int, int], int], address: int, size: int) -> None:
    if unmap(address, size) != 0:
        raise MemoryRoomError(f"munmap of {size} bytes failed: {os.strerror(ctypes.get_errno())}")
