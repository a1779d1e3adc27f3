"""One job at a time per output folder: two would write the same checkpoints.

The folder itself is locked, so that nothing is written into it. The lock is handed on to the ranks (see
``seams.lifeline``) and is free when the last process of the job is gone, however it ended.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from simpletuner_gh200.errors import UsageError

_DRAFT = re.compile(r"(?:staging-.+|plan|summary)\.\d+\.tmp")
"""As ``telemetry.sink.write_whole`` names its drafts."""


@contextmanager
def held(folder: Path) -> Iterator[int | None]:
    """The descriptor that holds the lock; None where the file system knows no locks. Raises if another job has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as refused:
        raise UsageError(
            f"output_dir {str(folder)!r} can't be used: {refused}",
            remedy="name another folder, or remove what is there",
        ) from refused
    try:
        locked = _locked(fd, folder)
        if locked:
            _sweep(folder)
        yield fd if locked else None
    finally:
        os.close(fd)


def in_use(folder: Path) -> str:
    """Who is at work in this output folder, in words; empty where nobody is, or where it can't be seen from here."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return _holders(fd)
    finally:
        os.close(fd)


def _locked(fd: int, folder: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"output_dir {str(folder)!r} is in use: {_holders(fd) or 'another job, not visible from here, holds it'}",
            remedy="let that job end or stop it, or give this one an output_dir of its own",
        ) from None
    except OSError:  # network file systems that lock no folders
        return False
    return True


def _sweep(folder: Path) -> None:
    """Drafts that a job killed while writing left; nobody is at them while we hold the lock."""
    for path in (folder / "gh200").glob("*.tmp"):
        if _DRAFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _holders(fd: int) -> str:
    """Who locked the folder, in words."""
    place = f":{os.fstat(fd).st_ino}"
    rows = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    pids = {int(row[4]) for row in rows if row[1] == "FLOCK" and row[5].endswith(place)}
    return ", ".join(_in_words(pid) for pid in sorted(pids - {os.getpid(), 0}))


def _in_words(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(process.create_time()))
            what = " ".join(Path(word).name if word.startswith("/") else word for word in process.cmdline()[:4])
            return f"process {pid} of {process.username()} since {since} ({what})"
    except psutil.Error:  # its ranks may outlive it for a moment
        return f"what process {pid} has started"
