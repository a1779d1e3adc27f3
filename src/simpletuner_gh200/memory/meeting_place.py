"""Where the ranks of one node meet: a private directory holding one socket, gone again once everybody has come.

Its name begins as every rank of the run knows it and ends at random, so that nobody can take it beforehand. The others
look for it by the beginning, and believe only what belongs to this user alone (0700, owner checked); whatever else has
such a name is passed by, and said. The directory is locked by the rank that made it. After a kill -9 in the short time
during which it exists, the lock is free, so the next start of any run of the same user removes it.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.config.environment import text
from simpletuner_gh200.errors import SharingError

PREFIX = "simpletuner-gh200"
SOCKET = "meet"
_OUR_NAME = re.compile(rf"{PREFIX}-\d+-[0-9a-f]{{24}}-\w{{8}}")


def runtime_folder() -> Path:
    """The user's own runtime folder where the system provides a private one, else the temporary folder."""
    given = text("XDG_RUNTIME_DIR")
    if given and _is_private(Path(given)):
        return Path(given)
    return Path(tempfile.gettempdir())


@dataclass(frozen=True)
class Meeting:
    """What every rank of a run knows of its meeting place."""

    identity: str
    """24 hexadecimal digits."""
    folder: Path

    @property
    def beginning(self) -> str:
        return f"{PREFIX}-{os.getuid()}-{self.identity}-"

    def places(self) -> list[Path]:
        """Whatever has a name as the meeting place would have, oldest name first."""
        return sorted(self.folder.glob(f"{self.beginning}*"))

    def obstacles(self) -> list[str]:
        """Those of them that are not ours alone, in words."""
        found = []
        for place in self.places():
            with suppress(OSError):
                if (flaw := _not_ours(place.stat(follow_symlinks=False))) is not None:
                    found.append(f"{place} {flaw}")
        return found


def meeting(identity: str, folder: Path | None = None) -> Meeting:
    return Meeting(identity, folder or runtime_folder())


class Host:
    """The leader's side: makes the place, listens there, and takes it away again."""

    def __init__(self, meeting: Meeting) -> None:
        sweep(meeting.folder)
        _refuse_second(meeting)
        self._place, self._lock = _make_locked(meeting)
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


def call(meeting: Meeting) -> socket.socket | None:
    """A connection to whoever hosts the meeting; None while nobody does."""
    for place in meeting.places():
        with _opened(place) as folder:
            connection = None if folder is None else _connect(folder)
            if connection is not None:
                return connection
    return None


def _connect(folder: int) -> socket.socket | None:
    if _not_ours(os.fstat(folder)) is not None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{SOCKET}")
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def sweep(folder: Path) -> int:
    """Remove the places of this user's dead runs from ``folder``; how many there were.

    A place of ours has a name as we make it and nothing in it but our socket. A folder that somebody else gave such a
    name to, and put files into, stays.
    """
    removed = 0
    for place in folder.glob(f"{PREFIX}-{os.getuid()}-*"):
        if not _OUR_NAME.fullmatch(place.name):
            continue
        with _opened(place) as fd:
            if fd is not None and _holds_our_socket_alone(fd) and _try_lock(fd):
                _remove(place, fd)
                removed += 1
    return removed


def _holds_our_socket_alone(fd: int) -> bool:
    names = os.listdir(fd)
    if names not in ([], [SOCKET]):
        return False
    try:
        return not names or stat.S_ISSOCK(os.stat(SOCKET, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:  # its own run is taking the place away
        return False


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


def _refuse_second(meeting: Meeting) -> None:
    """Another living run of this user under the same name: its ranks and ours would mix."""
    for place in meeting.places():
        with _opened(place) as fd:
            if fd is not None and _not_ours(os.fstat(fd)) is None and not _try_lock(fd):
                raise SharingError(
                    f"the meeting place {place} is taken by another run of yours",
                    remedy="let the other run end, or use another MASTER_PORT",
                )


def _make_locked(meeting: Meeting) -> tuple[Path, int]:
    """Make a place and hold its lock. A sweeper may take it away before that: then make another."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=meeting.beginning, dir=meeting.folder))  # 0700, and new
        try:
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _still_there(place, fd):
            return place, fd
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
    with suppress(FileNotFoundError):
        os.unlink(SOCKET, dir_fd=fd)
    place.rmdir()


def _is_private(folder: Path) -> bool:
    try:
        found = folder.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _not_ours(found: os.stat_result) -> str | None:
    """Why this is not a place of ours, as the end of a sentence about it; None where it is."""
    if found.st_uid != os.getuid():
        return f"belongs to {_user(found.st_uid)}"
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    return f"is open to others (mode {found.st_mode & 0o777:o})" if found.st_mode & 0o077 else None


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"
