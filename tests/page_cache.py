"""What the kernel holds of a file, as page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def cached_bytes(path: Path) -> int:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as there,
    ):
        first = ctypes.c_char.from_buffer(there)
        pages = (ctypes.c_ubyte * (-(-len(there) // mmap.PAGESIZE)))()
        failed = _libc.mincore(ctypes.addressof(first), len(there), pages)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", path)
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def settled(path: Path) -> Path:
    """Written to the disk: what is not is never given back."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path
