"""Knowing that no file changed without asking for each: the kernel tells who touched a watched folder.

An event is only a hint. The file it names is looked at again; an entry goes if its file is not as it was. Where the
kernel can't be relied on (network file systems, too many folders, a lost event) ``reliable`` is false, and every
lookup asks for the file's size and time instead.

A user has few of the kernel's instances (128 by default), for all programs together. So one is taken when there is a
folder to watch, and given back as soon as it is of no use any more: lost, closed, or forgotten by whoever made it.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Iterator
from time import monotonic

_libc = ctypes.CDLL(None, use_errno=True)
_STATFS_BYTES = 512
"""More than any layout of ``struct statfs``; the kind is its first word on every 64-bit Linux."""

_EXT, _XFS, _BTRFS, _F2FS, _ZFS = 0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1
_TMPFS, _OVERLAY, _BCACHEFS = 0x01021994, 0x794C7630, 0xCA451A4E
_NFS, _CEPH, _GPFS = 0x6969, 0x00C36400, 0x47504653

_LOCAL = frozenset({_EXT, _XFS, _BTRFS, _F2FS, _ZFS, _TMPFS, _OVERLAY, _BCACHEFS})
_KEEPS_CHANGE_TIMES = _LOCAL | {_NFS, _CEPH, _GPFS}
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""To ask about a folder; where it is a link, about the one that it leads to."""


def is_local(fd: int) -> bool:
    """Only where every change goes through this machine's kernel does it know of every change."""
    return _kind(fd) in _LOCAL


def keeps_change_times(folder: str) -> bool:
    """Does the file system itself note when a file was last changed, in a place no user can write to?"""
    try:
        fd = os.open(folder, _FOLDER)
    except OSError:
        return False
    try:
        return _kind(fd) in _KEEPS_CHANGE_TIMES
    finally:
        os.close(fd)


def _kind(fd: int) -> int | None:
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, answer) != 0:
        return None
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF


_WANTED = 0xFCE
"""Of inotify: a file was written, closed, touched, made, deleted or renamed; or the folder itself."""
_ONLYDIR = 0x01000000
_LOST = 0xEC00
"""The folder was deleted, renamed or unmounted, or the kernel dropped events or the watch."""
_EVENT = struct.Struct("iIII")

LOOK_EVERY_SECONDS = 1.0
"""Renaming a folder further up is no event: the path is followed again this often."""


class FolderWatch:
    """Watches folders that hold cache files. Not for several threads at once: callers hold a lock."""

    def __init__(self) -> None:
        self._fd = -1
        self._lost = False
        self._pid = os.getpid()
        self._folders: dict[str, tuple[int, int] | None] = {}
        """None: can't be relied on."""
        self._names: dict[int, str] = {}
        self._looked = monotonic()
        self._poll = select.poll()

    @property
    def reliable(self) -> bool:
        """False in a forked child too: events would be taken by whoever reads first."""
        return not self._lost and self._pid == os.getpid()

    def covers(self, folder: str) -> bool:
        """Start, or go on, watching ``folder``; False where that can't be relied on."""
        if not self.reliable:
            return False
        if folder not in self._folders:
            try:
                opened = os.open(folder, _FOLDER)
            except OSError:
                return False
            try:
                self._folders[folder] = self._watch(folder, opened)
            finally:
                os.close(opened)
        return self._folders[folder] is not None

    def _watch(self, folder: str, opened: int) -> tuple[int, int] | None:
        """Asks about and watches what is open, wherever a link to it may lead by then."""
        if not is_local(opened):
            return None
        if self._fd < 0:
            self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd < 0:
                self._lost = True
                return None
            self._poll.register(self._fd, select.POLLIN)
        number = _libc.inotify_add_watch(self._fd, b"/proc/self/fd/%d" % opened, _WANTED | _ONLYDIR)
        if number < 0:
            return None
        self._names[number] = folder
        return _identity(opened)

    def quiet(self) -> bool:
        """Is it certain that nothing happened? A short way to know what nearly every lookup finds."""
        if self._lost or self._pid != os.getpid() or monotonic() - self._looked > LOOK_EVERY_SECONDS:
            return False
        return not self._poll.poll(0)

    def changed(self) -> list[str]:
        """Paths that something happened to since the last call."""
        now = monotonic()
        if now - self._looked > LOOK_EVERY_SECONDS:
            self._looked = now
            self._lost |= any(seen not in (None, _identity(folder)) for folder, seen in self._folders.items())
        found = [] if self._fd < 0 else list(self._events())
        if self._lost:
            self.close()
        return found

    def _events(self) -> Iterator[str]:
        while self._poll.poll(0):
            data, at = os.read(self._fd, 65536), 0
            while at < len(data):
                number, mask, _cookie, length = _EVENT.unpack_from(data, at)
                name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                if mask & _LOST:
                    self._lost = True
                elif name and number in self._names:
                    yield os.path.join(self._names[number], os.fsdecode(name))

    def close(self) -> None:
        """It tells of nothing any more. Doing it twice is fine."""
        fd, self._fd, self._lost = self._fd, -1, True
        if fd >= 0:
            self._poll.unregister(fd)
            os.close(fd)

    __del__ = close


def _identity(folder: str | int) -> tuple[int, int] | None:
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_ino, found.st_dev
