"""One job at a time per output folder: two would write the same checkpoints.

The folder itself is locked, so that nothing is written into it. The lock is handed on to the ranks (see
``seams.lifeline``) and is free when the last process of the job is gone, however it ended.
"""

from __future__ import annotations

import fcntl
import os
import pwd
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
    """Who has the folder open as a job has, in words."""
    wanted = os.fstat(fd)
    found = []
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _has_open(process.pid, wanted):
            found.append(process)
    return ", ".join(_in_words(process) for process in found)


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    try:
        for name in os.listdir(f"/proc/{pid}/fdinfo"):
            with open(f"/proc/{pid}/fdinfo/{name}", encoding="ascii") as info:
                locked = any(line.startswith("lock:") and f":{wanted.st_ino} " in line for line in info)
            if locked and os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                return True
    except OSError:
        return False  # gone meanwhile, or another user's
    return False


def _in_words(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(process.create_time()))
            user = pwd.getpwuid(process.uids().real).pw_name
            what = " ".join(Path(word).name if word.startswith("/") else word for word in process.cmdline()[:4])
    except (psutil.Error, KeyError):
        return f"process {process.pid}"
    return f"process {process.pid} of {user} since {since} ({what})"
