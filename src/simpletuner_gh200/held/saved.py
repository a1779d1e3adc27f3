"""A checkpoint that was saved to memory and is on its way to the disk: where it is, whose it is, what becomes of it.

One folder per run on a memory file system of the node, for this user alone::

    simpletuner-gh200-<user>-saved-<pid>-<start>/
        owner           locked by the rank that saves, for as long as it lives
        drainer         locked by the process that copies
        checkpoint-12/  as SimpleTuner writes it
        order.json      there once checkpoint-12 is whole: what is to be copied where. Gone when it is on the disk
        told.json       what became of the last order
        way.json        while several ranks write: where they do

Locks, not process numbers, tell who lives: containers that share memory see other numbers. Whoever comes later, the
launcher at its end or the next start, has what a dead owner left copied to its place, and clears the memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import LIFELINE, for_child
from simpletuner_gh200.memory.host import ROOT

PATIENCE = 600.0
"""Seconds for which a disk may refuse before a checkpoint is given up."""

OWNER, DRAINER, ORDER, TOLD, WAY = "owner", "drainer", "order.json", "told.json", "way.json"

_NAME = re.compile(rf"simpletuner-gh200-{os.getuid()}-saved-(\d+-\d+)")
"""Without the word checkpoint: SimpleTuner replaces that word in the whole of a path to name a folder for drafts."""

_DRAFT = ".gh200-draining-"
"""Before the name of a checkpoint that is being copied; nothing that SimpleTuner takes for one."""

_PLACE = re.compile(rf"{re.escape(_DRAFT)}(checkpoint-\d+(?:-rolling)?)-")
"""The checkpoint that a draft is to be."""

_FORSAKEN = 3600.0
"""Seconds without a sign of life after which another node's draft is nobody's."""

MOST_STARTS = 5
"""Of drainers for one checkpoint, each of which somebody has killed."""


@dataclass(frozen=True)
class Order:
    """What is to be copied where."""

    source: str
    """A name in the memory folder."""
    target: str
    saved_at: float
    """When training was at that point, by the clock."""
    patience: float = PATIENCE
    rate: float | None = None
    """Bytes per second that the disk is to be taken for, where somebody measures."""
    files: dict[str, int] | None = None
    """What was in it when it was given, and how long: memory can lose files, and the rest is no checkpoint."""


@dataclass(frozen=True)
class Told:
    """What became of an order, or becomes of it."""

    source: str
    seconds: float = 0.0
    bytes: int = 0
    failing: str | None = None
    """What the disk answers."""
    given_up: bool = False


class MemoryFolder:
    """A run's folder on a memory file system, as its owner, its drainer and those who come later see it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, parent: Path) -> MemoryFolder:
        """This process's own, locked by it until it ends. Nobody sees it under its name before it is locked."""
        place = parent / f"simpletuner-gh200-{os.getuid()}-saved-{os.getpid()}-{time.time_ns() // 1_000_000}"
        unlocked = place.with_name(f"{place.name}.new")
        unlocked.mkdir(mode=0o700)
        folder = cls(place)
        folder._own = os.open(unlocked / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(folder._own, fcntl.LOCK_EX)
        unlocked.rename(place)
        return folder

    _own: int | None = None

    @property
    def owner(self) -> str:
        """Its process and when that made it, as in the name."""
        return self.path.name.rpartition("saved-")[2]

    def locked(self, name: str) -> bool:
        """Does anybody hold this lock?"""
        with self._lock(name, fcntl.LOCK_SH) as ours:  # others may ask at the same time
            return not ours

    @contextmanager
    def _lock(self, name: str, kind: int = fcntl.LOCK_EX) -> Iterator[bool]:
        try:
            fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the folder itself is gone
            yield True
            return
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(fd)

    def draining(self) -> Any:
        """For the drainer: is it the only one, while it holds this?"""
        return self._lock(DRAINER)

    def order(self) -> Order | None:
        found = self._read(ORDER)
        return None if found is None else Order(**found)

    def told(self) -> Told | None:
        found = self._read(TOLD)
        return None if found is None else Told(**found)

    def size(self, order: Order) -> int:
        return sum(path.stat().st_size for path in _files_in(self.path / order.source))

    def clear(self) -> None:
        """Whatever of a checkpoint is in it."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def announce(self, name: str, *, memory: bool) -> None:
        """The first rank tells those that write with it whether ``name`` goes to memory, until it withdraws that."""
        self._write(WAY, {"name": name, "memory": memory})

    def withdraw(self) -> None:
        (self.path / WAY).unlink(missing_ok=True)

    def hear(self, name: str) -> bool:
        """In another rank of the node."""
        while (found := self._read(WAY)) is None or found["name"] != name:
            time.sleep(0.005)
        return bool(found["memory"])

    def give(self, order: Order) -> None:
        (self.path / TOLD).unlink(missing_ok=True)
        source = self.path / order.source
        sizes = {path.relative_to(source).as_posix(): path.stat().st_size for path in _files_in(source)}
        self._write(ORDER, asdict(replace(order, files=sizes)))

    def tell(self, told: Told) -> None:
        self._write(TOLD, asdict(told))

    def conclude(self, order: Order, told: Told) -> None:
        """The order is carried out, or given up: the memory is free again."""
        self.tell(told)
        (self.path / ORDER).unlink(missing_ok=True)
        shutil.rmtree(self.path / order.source, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        """To the drainer, which clears it when it is done."""
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def draft(self, order: Order) -> Path:
        """Where the checkpoint is until it is whole: next to its place."""
        target = Path(order.target)
        return target.with_name(f"{_DRAFT}{target.name}-{platform.node()}-{self.owner}")

    def start_drainer(self) -> subprocess.Popen[bytes]:
        """A process of its own session that no signal of the run's reaches, and that outlives whoever starts it."""
        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # what is started inherits it
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "simpletuner_gh200.held.drain", str(self.path)],
                env=for_child({}, without=(LIFELINE,)),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found

    def _write(self, name: str, content: dict[str, Any]) -> None:
        partial = self.path / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(self.path / name)


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# -- memory file systems -----------------------------------------------------------------------------------


def memory_file_systems(root: Path = ROOT) -> list[tuple[Path, int]]:
    """Those that this user may write to, and their free bytes: /dev/shm first, then the roomiest."""
    found = {}
    mounts = root / "proc/self/mounts"
    for line in mounts.read_bytes().splitlines() if mounts.exists() else ():
        _device, place, kind, options, *_ = map(os.fsdecode, line.split())
        where = Path(os.fsdecode(os.fsencode(place).decode("unicode_escape").encode("latin-1")))
        usable = kind == "tmpfs" and "rw" in options.split(",") and where.parts[1:2] not in (("sys",), ("proc",))
        if usable and os.access(where, os.W_OK | os.X_OK):
            with suppress(OSError):
                room = os.statvfs(where)
                found[where] = room.f_bavail * room.f_frsize
    return sorted(found.items(), key=lambda each: (each[0] != Path("/dev/shm"), -each[1]))


def place_for(size: int, systems: list[tuple[Path, int]]) -> tuple[Path, int] | None:
    """The first with so much room, else the one with most; None where there is none at all. Pure."""
    with_room = (each for each in systems if each[1] >= size)
    return next(with_room, max(systems, key=lambda each: each[1], default=None))


def memory_folders() -> list[MemoryFolder]:
    """Of all this user's runs on this node, dead or alive."""
    places = [place for parent, _room in memory_file_systems() for place in parent.glob("simpletuner-gh200-*")]
    return [MemoryFolder(place) for place in places if _NAME.fullmatch(place.name) and _our_own(place)]


def _our_own(place: Path) -> bool:
    """Anybody can write to a memory file system: an order of somebody else's would be carried out with our rights."""
    try:
        found = place.lstat()
    except FileNotFoundError:  # it was cleared meanwhile
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


# -- those who come later ----------------------------------------------------------------------------------


def settle(output: Path, say: Callable[[str], None], *, until: float | None = None) -> list[str]:
    """Before anybody looks for checkpoints in ``output``: what dead runs left in memory is on the disk, or is cleared.

    Other folders' checkpoints are seen to as well, and not waited for. ``until`` (by the clock) the disk is waited for,
    for ever if not said. Returns what is not on the disk after all, in words.
    """
    lost = []
    for folder in memory_folders():
        if folder.locked(OWNER):
            continue
        order = folder.order()
        if order is None and not folder.locked(DRAINER):
            folder.remove()
        elif order is not None:
            if not folder.locked(DRAINER):
                folder.start_drainer()
            if os.path.realpath(Path(order.target).parent) == os.path.realpath(output):
                lost += _see_through(folder, order, say, until)
    _clear_drafts(output)
    return lost


def _see_through(folder: MemoryFolder, order: Order, say: Callable[[str], None], until: float | None) -> list[str]:
    """Of a run that is gone, until the disk has it."""
    said = "it is in memory alone, and is being written"
    say(f"{order.target}: {said}")
    starts = 0
    while folder.order() == order:
        if until is not None and time.time() > until:
            return [f"{order.target} is not on disk yet; that goes on in the background"]
        told = folder.told()
        if told is not None and told.failing not in (None, said):
            said = str(told.failing)
            say(f"{order.target} can't be written, and is tried again: {said}")
        time.sleep(0.05)
        if not folder.locked(DRAINER) and folder.order() == order:  # somebody has killed it, or it has yet to begin
            starts += 1
            if starts > MOST_STARTS:
                return [f"{order.target} stays in {folder.path}: the process that copies it ends at once"]
            folder.start_drainer().wait()
    told = folder.told()
    folder.remove()
    return [f"{order.target} was given up: {told.failing}"] if told is not None and told.given_up else []


def _clear_drafts(output: Path) -> None:
    """Copies that nobody goes on with: their memory is gone, with a restart of the node say."""
    here = f"-{platform.node()}-"
    living = {folder.owner for folder in memory_folders()}
    for draft in output.glob(f"{_DRAFT}*"):
        name = draft.name.removesuffix(".old")
        ours = here in name and re.fullmatch(r"\d+-\d+", name.rpartition(here)[2])
        if (name.rpartition(here)[2] not in living) if ours else _age(draft) > _FORSAKEN:
            target = _PLACE.match(name)
            if draft.name != name and target is not None and not draft.with_name(target[1]).exists():
                with suppress(OSError):  # it stays as it is
                    draft.rename(draft.with_name(target[1]))  # its successor never got there
            else:
                shutil.rmtree(draft, ignore_errors=True)


def _age(draft: Path) -> float:
    """Seconds since anybody wrote to it."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
    except FileNotFoundError:  # somebody is at it
        return 0.0
