"""The folder of one cache's packs, opened once and then used through its descriptor.

``cache_dir`` may be writable by others. So a folder that is not ours is not used, and what somebody put into ours, a
link to be written through above all, is never followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.held.segment import Segment, is_ours
from simpletuner_gh200.memory.regular_files import OPEN_FLAGS

SUFFIX = ".pack"
MARKER = "gh200-cache"
"""A file with this name says that a folder is ours, and which cache it is of."""

LOCK = ".lock"
READ_ONLY = 0o400
"""Nobody writes to a pack once it is there."""
_LONGEST_MARKER = 1 << 16


class NotOurs(CacheError):
    """A folder or link that somebody else made where our packs should go."""


def folder_for(root: Path, name: str, cache_folder: str) -> Path:
    """Where the packs of one cache live: readable, and different for caches of the same name elsewhere."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80].lstrip(".") or "cache"
    return root / f"{safe}-{xxhash.xxh3_64_hexdigest(cache_folder.encode('utf-8', 'surrogateescape'))[:8]}"


class PackPlace:
    """An open folder that is ours."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self.fd = fd

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[PackPlace]:
        """OSError where there is none; NotOurs where it is a link, or belongs to another user."""
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as refused:
            if refused.errno in (errno.ELOOP, errno.ENOTDIR) and folder.is_symlink():
                raise NotOurs(f"{folder} is a link, not a folder of ours", remedy="remove it") from None
            raise
        try:
            found = os.fstat(fd)
            if not is_ours(found):
                raise NotOurs(f"{folder} belongs to user {found.st_uid}, not to us", remedy="use another cache_dir")
            yield cls(folder, fd)
        finally:
            os.close(fd)

    @classmethod
    def make(cls, folder: Path, cache_folder: str) -> None:
        """Make the folder, and mark it as that of the cache in ``cache_folder``."""
        root = folder.parent
        if root.is_symlink() and not is_ours(root.lstat()):
            raise NotOurs(f"{root} is a link of user {root.lstat().st_uid}", remedy="use another cache_dir")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.is_symlink():
            folder.mkdir(mode=0o700, exist_ok=True)
        with cls.open(folder) as place:
            place.mark(cache_folder)

    def mark(self, cache_folder: str) -> None:
        if self.marked() != cache_folder:
            with self.new_file(MARKER) as fd:
                os.write(fd, f"{cache_folder}\n".encode("utf-8", "surrogateescape"))
                os.fsync(fd)

    def marked(self) -> str | None:
        """The cache folder that this one is marked with."""
        try:
            fd = os.open(MARKER, OPEN_FLAGS | os.O_NOFOLLOW, dir_fd=self.fd)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or not is_ours(found):
                return None
            return os.read(fd, _LONGEST_MARKER).decode("utf-8", "surrogateescape").rstrip("\n")
        finally:
            os.close(fd)

    def packs(self) -> dict[str, int]:
        """Name and inode of every pack, oldest first."""
        with os.scandir(self.fd) as entries:
            found = {entry.name: entry.inode() for entry in entries if _is_pack(entry.name)}
        return dict(sorted(found.items()))

    def next_name(self) -> str:
        return f"{max((int(name.removesuffix(SUFFIX)) for name in self.packs()), default=0) + 1:08d}{SUFFIX}"

    def pack(self, name: str) -> Segment:
        return Segment.on_disk(self.folder / name, os.open(name, OPEN_FLAGS | os.O_NOFOLLOW, dir_fd=self.fd))

    @contextmanager
    def new_file(self, name: str) -> Iterator[int]:
        """A descriptor to write ``name`` by, so that at every moment it is the old file, or absent, or complete.

        What somebody may have put there to be written through is not opened.
        """
        fresh = f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self.fd)
        try:
            if not is_ours(os.fstat(fd)):
                raise CacheError(
                    f"files that we make in {self.folder} are not ours afterwards (user {os.fstat(fd).st_uid})",
                    remedy="set cache_config.cache_dir to a folder on a file system that keeps our user",
                )
            yield fd
            os.fchmod(fd, READ_ONLY)
            os.replace(fresh, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(fresh, dir_fd=self.fd)
            raise
        finally:
            os.close(fd)
        os.fsync(self.fd)

    def remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return

    def sweep(self) -> None:
        """What a killed writer left. For whoever holds the lock: then nobody is at it."""
        for name in os.listdir(self.fd):
            if name.startswith(".") and name.endswith(".tmp") and (SUFFIX in name or MARKER in name):
                self.remove(name)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Alone among all jobs that use this folder, on whatever machine; False where another one is at it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(LOCK, flags, 0o600, dir_fd=self.fd)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(fd)


def _is_pack(name: str) -> bool:
    return name.endswith(SUFFIX) and name.removesuffix(SUFFIX).isascii() and name.removesuffix(SUFFIX).isdigit()
