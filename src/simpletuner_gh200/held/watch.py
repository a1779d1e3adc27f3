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
import weakref
from collections.abc import Iterator
from time import monotonic

from simpletuner_gh200.held.file_system import is_local, open_folder

_CLOSE_WRITE, _MODIFY, _ATTRIB = 0x8, 0x2, 0x4
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _ONLYDIR = 0x400, 0x800, 0x01000000
_UNMOUNT, _OVERFLOW, _IGNORED = 0x2000, 0x4000, 0x8000
_WANTED = _CLOSE_WRITE | _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF
_LOST = _DELETE_SELF | _MOVE_SELF | _UNMOUNT | _OVERFLOW | _IGNORED
_EVENT = struct.Struct("iIII")

LOOK_EVERY_SECONDS = 1.0
"""Renaming a folder further up is no event: the path is followed again this often."""

_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """Watches folders that hold cache files. Not for several threads at once: callers hold a lock."""

    def __init__(self) -> None:
        self._fd = -1
        self._given_back: weakref.finalize[..., FolderWatch] | None = None
        self._pid = os.getpid()
        self._folders: dict[str, tuple[int, int]] = {}
        self._refused: set[str] = set()
        self._looked = monotonic()
        self._poll = select.poll()
        self._names: dict[int, str] = {}
        self._lost = False

    @property
    def reliable(self) -> bool:
        """False in a forked child too: events would be taken by whoever reads first."""
        return not self._lost and self._pid == os.getpid()

    def covers(self, folder: str) -> bool:
        """Start, or go on, watching ``folder``; False where that can't be relied on."""
        if not self.reliable:
            return False
        if folder in self._folders:
            return True
        if folder in self._refused:
            return False
        try:
            opened = open_folder(folder)
        except OSError:
            return False
        try:
            return self._watch(folder, opened)
        finally:
            os.close(opened)

    def _watch(self, folder: str, opened: int) -> bool:
        """Asks about and watches what is open, wherever a link to it may lead by then."""
        if not is_local(opened):
            self._refused.add(folder)
            return False
        if self._fd < 0 and not self._begin():
            return False
        number = _libc.inotify_add_watch(self._fd, b"/proc/self/fd/%d" % opened, _WANTED | _ONLYDIR)
        if number < 0:
            return False
        found = os.fstat(opened)
        self._folders[folder] = (found.st_ino, found.st_dev)
        self._names[number] = folder
        return True

    def _begin(self) -> bool:
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            self._lost = True
            return False
        self._given_back = weakref.finalize(self, os.close, self._fd)
        self._poll.register(self._fd, select.POLLIN)
        return True

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
            self._lost = self._lost or any(_identity(folder) != seen for folder, seen in self._folders.items())
        found = [path for data in self._events() for path in self._parse(data)] if self._poll.poll(0) else []
        if self._lost:
            self.close()
        return found

    def _events(self) -> Iterator[bytes]:
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            yield data

    def _parse(self, data: bytes) -> Iterator[str]:
        at = 0
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
        if self._given_back is not None:
            self._poll.unregister(self._fd)
            self._given_back()
            self._given_back = None
        self._fd, self._lost = -1, True


def _identity(folder: str) -> tuple[int, int] | None:
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_ino, found.st_dev
