"""Where the ranks of one node meet: a private directory holding one socket, gone again once everybody has come.

The directory is ours alone (0700, owner checked) and locked by the rank that made it. After a kill -9 in the short
time during which it exists, the lock is free, so the next start of any run of the same user removes it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simpletuner_gh200.errors import SharingError

PREFIX = "simpletuner-gh200"
SOCKET = "meet"


def runtime_folder() -> Path:
    """The user's own runtime folder where the system provides a private one, else the temporary folder."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and _is_private(Path(given)):
        return Path(given)
    return Path(tempfile.gettempdir())


def place_for(identity: str, folder: Path | None = None) -> Path:
    return (folder or runtime_folder()) / f"{PREFIX}-{os.getuid()}-{identity}"


class Host:
    """The leader's side: makes the place, listens there, and takes it away again."""

    def __init__(self, place: Path) -> None:
        sweep(place.parent)
        self._place = place
        self._lock = _make_locked(place)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Through the descriptor: a socket address is limited to 108 bytes, the path of a temporary folder is not.
            self.listener.bind(f"/proc/self/fd/{self._lock}/{SOCKET}")
            self.listener.listen(64)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock < 0:
            return
        self.listener.close()
        _remove(self._place, self._lock)
        os.close(self._lock)
        self._lock = -1


def call(place: Path) -> socket.socket | None:
    """A connection to whoever hosts ``place``; None while nobody does."""
    try:
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _check_private(place, os.fstat(folder))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        return connection
    finally:
        os.close(folder)


def sweep(folder: Path) -> int:
    """Remove the places of this user's dead runs from ``folder``; how many there were."""
    removed = 0
    for place in folder.glob(f"{PREFIX}-{os.getuid()}-*"):
        with _opened(place) as fd:
            if fd is None or not _try_lock(fd):
                continue
            _remove(place, fd)
            removed += 1
    return removed


@contextmanager
def _opened(place: Path) -> Iterator[int | None]:
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield fd if os.fstat(fd).st_uid == os.getuid() else None
    finally:
        os.close(fd)


def _make_locked(place: Path) -> int:
    """Make ``place`` and hold its lock. A sweeper may take it away between the two steps: then make it again."""
    while True:
        try:
            place.mkdir(mode=0o700)
        except FileExistsError as exists:
            raise SharingError(
                f"the meeting place {place} is taken by another run or another user",
                remedy="let the other run end, or use another MASTER_PORT",
            ) from exists
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _still_there(place, fd):
            return fd
        os.close(fd)


def _still_there(place: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(place, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(place: Path, fd: int) -> None:
    if not _still_there(place, fd):
        return
    for name in os.listdir(fd):
        os.unlink(name, dir_fd=fd)
    place.rmdir()


def _is_private(folder: Path) -> bool:
    try:
        found = folder.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _check_private(place: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SharingError(
            f"the meeting place {place} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}, not to us "
            f"alone",
            remedy="remove it, or set XDG_RUNTIME_DIR to a folder of your own",
        )
