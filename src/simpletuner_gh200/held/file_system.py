"""What kind of file system a folder is on, asked of the opened folder, so that a link can't lead the answer astray."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_STATFS_BYTES = 512
"""More than any layout of ``struct statfs``; the kind is its first word on every 64-bit Linux."""

_EXT, _XFS, _BTRFS, _F2FS, _ZFS = 0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1
_TMPFS, _OVERLAY, _BCACHEFS = 0x01021994, 0x794C7630, 0xCA451A4E
_NFS, _CEPH, _GPFS = 0x6969, 0x00C36400, 0x47504653

_LOCAL = frozenset({_EXT, _XFS, _BTRFS, _F2FS, _ZFS, _TMPFS, _OVERLAY, _BCACHEFS})
_KEEPS_CHANGE_TIMES = _LOCAL | {_NFS, _CEPH, _GPFS}


def is_local(fd: int) -> bool:
    """Only where every change goes through this machine's kernel does it know of every change."""
    return _kind(fd) in _LOCAL


def keeps_change_times(fd: int) -> bool:
    """Does the file system itself note when a file was last changed, in a place no user can write to?"""
    return _kind(fd) in _KEEPS_CHANGE_TIMES


def open_folder(folder: str) -> int:
    """A descriptor to ask about ``folder``; where it is a link, about the folder that it leads to."""
    return os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _kind(fd: int) -> int | None:
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, answer) != 0:
        return None
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF
