"""A checkpoint that was saved to memory and is on its way to the disk: where it is, whose it is, what becomes of it.

One folder per run and node on a memory file system, for this user alone::

    simpletuner-gh200-<user>-saved-<pid>-<start>/
        owner           locked by the first rank of the node, for as long as it lives
        drainer         locked by the process that copies
        checkpoint-12/  as SimpleTuner writes it
        order.json      there once checkpoint-12 is whole: what is to be copied where. Gone when it is on the disk
        told.json       what became of the last order

Locks, not process numbers, tell who lives: containers that share memory see other numbers. What a dead owner left is
seen to by whoever comes later, see ``settling.py``.

On the disk the checkpoint is a draft next to its place until it is whole. Its name tells from whose memory it comes:
``.gh200-draining-checkpoint-12-<node>-<memory>-<pid>-<start>``. Where several nodes have a part each, it is one draft
for all, and each leaves a list of its files beside it (``.part1``) when they are all there.
"""

from __future__ import annotations

import errno
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import LIFELINE, for_child
from simpletuner_gh200.memory.host import ROOT
from simpletuner_gh200.telemetry.sink import write_whole
from simpletuner_gh200.units import MIB

PATIENCE = 600.0
"""Seconds for which a disk may refuse before a checkpoint is given up."""

OWNER, DRAINER, ORDER, TOLD = "owner", "drainer", "order.json", "told.json"

SPARE = MIB // 4
"""Bytes that ``owner`` holds for what is said of a checkpoint, however full others have made the memory meanwhile."""

CLAIM = Path("gh200", "saves.json")
"""In an output folder: the run whose checkpoints it takes. A folder that was made anew has none, or another."""

_NAME = re.compile(rf"simpletuner-gh200-{os.getuid()}-saved-(\d+-\d+)")
"""Without the word checkpoint: SimpleTuner replaces that word in the whole of a path to name a folder for drafts."""

DRAFT = ".gh200-draining-"
"""Before the name of a checkpoint that is being copied; nothing that SimpleTuner takes for one."""

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
    """What is to be copied, and how long it was: memory can lose files, and the rest is no checkpoint."""
    run: str = ""
    """Whose it is: as the folder of its first node says, see ``MemoryFolder.run``."""
    disk: int | None = None
    """The device of the output folder that its run has claimed; None where nobody has."""
    part: int = 0
    parts: int = 1
    """Of nodes, of which the first gives the checkpoint its name."""


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
        place = parent / f"simpletuner-gh200-{os.getuid()}-saved-{os.getpid()}-{time.time_ns()}"
        unlocked = place.with_name(f"{place.name}.new")
        unlocked.mkdir(mode=0o700)
        folder = cls(place)
        folder._own = os.open(unlocked / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(folder._own, fcntl.LOCK_EX)
        try:
            os.posix_fallocate(folder._own, 0, SPARE)
            unlocked.rename(place)
        except OSError:
            folder.leave()
            shutil.rmtree(unlocked)
            raise
        return folder

    _own: int | None = None

    @property
    def owner(self) -> str:
        """Its process and when that made it, as in the name."""
        return self.path.name.rpartition("saved-")[2]

    @property
    def run(self) -> str:
        """Says from whose memory a draft comes, on a disk that several nodes and containers see."""
        return f"{platform.node()}-{memory_id(self.path)}-{self.owner}"

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

    def clear(self) -> None:
        """Whatever of a checkpoint is in it."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def files(self, name: str) -> dict[str, int]:
        """Of what was saved under this name, and how long each is."""
        source = self.path / name
        found = (path for path in source.rglob("*") if path.is_file())
        return {path.relative_to(source).as_posix(): path.stat().st_size for path in found}

    def give(self, order: Order) -> None:
        (self.path / TOLD).unlink(missing_ok=True)
        files = self.files(order.source) if order.files is None else order.files
        self._write(ORDER, asdict(replace(order, files=files, run=order.run or self.run)))

    def tell(self, told: Told) -> None:
        self._write(TOLD, asdict(told))

    def conclude(self, order: Order, told: Told) -> None:
        """The order is carried out, or given up: the memory is free again."""
        self.tell(told)
        (self.path / ORDER).unlink(missing_ok=True)
        shutil.rmtree(self.path / order.source, ignore_errors=True)
        with suppress(OSError), (self.path / OWNER).open("r+b") as owner:
            os.posix_fallocate(owner.fileno(), 0, SPARE)

    def remove(self) -> None:
        self.leave()
        shutil.rmtree(self.path, ignore_errors=True)

    def leave(self) -> None:
        """To the drainer, which clears it when it is done."""
        if self._own is not None:
            fcntl.flock(self._own, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
            os.close(self._own)
            self._own = None

    def draft(self, order: Order) -> Path:
        """Where the checkpoint is until it is whole: next to its place."""
        target = Path(order.target)
        return target.with_name(f"{DRAFT}{target.name}-{order.run or self.run}")

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
        partial, words = self.path / f".{name}.{os.getpid()}", json.dumps(content)
        try:
            partial.write_text(words, encoding="utf-8")
        except OSError as full:
            if full.errno != errno.ENOSPC:
                raise
            os.truncate(self.path / OWNER, 0)
            partial.write_text(words, encoding="utf-8")
        partial.replace(self.path / name)


def beside(draft: Path, what: str) -> Path:
    """What is kept next to a draft: the older checkpoint of its name, or the list of a node's part."""
    return draft.with_name(f"{draft.name}.{what}")


# -- the folder that a run's checkpoints go to ----------------------------------------------------------------


def claim(output: Path, run: str) -> None:
    """From now on it takes this run's checkpoints alone: what another node still has of an earlier run is late."""
    write_whole(output / CLAIM, {"run": run})


def claimed(output: Path) -> str | None:
    """By which run; None where nobody has. Raises OSError where the disk does not answer."""
    try:
        found = json.loads((output / CLAIM).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return str(found["run"])


def disclaim(output: Path, run: str) -> None:
    """What is late of this run is not taken any more."""
    with suppress(OSError):
        if claimed(output) == run:
            (output / CLAIM).unlink()


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


def memory_id(place: Path, root: Path = ROOT) -> str:
    """Which memory that is: two containers may have one name, and each its own. Ours do not outlive the kernel."""
    kernel = (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{kernel}.{place.stat().st_dev:x}"


def memories() -> set[str]:
    """Those that can be seen from here."""
    return {memory_id(place) for place, _room in memory_file_systems()}


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
