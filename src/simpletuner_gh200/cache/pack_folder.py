"""The packs of one cache: loaded newest first, added to, made into one when most of their bytes are dead."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from simpletuner_gh200.cache.pack import DamagedPack, Item, Pack, PackEntry, write_pack
from simpletuner_gh200.cache.record import Record
from simpletuner_gh200.cache.segment import Segment
from simpletuner_gh200.cache.slots import FINITE, Range, Slot, key_of, source_words
from simpletuner_gh200.cache.source import ordinary
from simpletuner_gh200.cache.table import Found, Table
from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")

SUFFIX = ".pack"
MARKER = "gh200-cache"
"""A file with this name says that a folder is ours, and which cache it is of."""

MOSTLY_DEAD = 0.5
ROOM_TO_SPARE = 64 << 20


@dataclass
class Loaded:
    """What became of the packs at start."""

    entries: int = 0
    bytes: int = 0
    changed: int = 0
    """Entries whose source file is another now, or gone."""
    damaged: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def folder_for(root: Path, name: str, cache_folder: str) -> Path:
    """Where the packs of one cache live: readable, and different for caches of the same name elsewhere."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80].lstrip(".") or "cache"
    return root / f"{safe}-{xxhash.xxh3_64_hexdigest(cache_folder.encode('utf-8', 'surrogateescape'))[:8]}"


class PackFolder:
    """``folder`` holds nothing but packs of one cache. Safe to use from several jobs at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._packed: dict[str, tuple[int, int]] = {}
        """Path -> (size, mtime_ns) of what the packs hold and can be believed."""
        self._total = self._alive = 0

    def make(self, cache_folder: str) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker, text = self.folder / MARKER, cache_folder + "\n"
        if marker.exists() and marker.read_text(encoding="utf-8", errors="surrogateescape") == text:
            return
        fresh = self.folder / f".{MARKER}.{os.getpid()}.tmp"
        with fresh.open("w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(marker)

    def packs(self) -> list[Path]:
        """Oldest first."""
        return sorted(path for path in self.folder.glob(f"*{SUFFIX}") if path.stem.isdigit())

    # -- loading ---------------------------------------------------------------------------------------

    def load(self, table: Table, *, copy: bool, workers: int, tick: Callable[[], None] = lambda: None) -> Loaded:
        """Publish every entry whose source is as it was. ``copy``: into slabs; else the file itself is served.

        ``tick`` is called at every entry.
        """
        done, started = Loaded(), time.perf_counter()
        for path in reversed(self.packs()):
            try:
                pack = Pack(path)
            except FileNotFoundError:
                continue
            except OSError as unreadable:  # of another user, say: not ours to remove, and no reason to stop
                done.notes.append(str(unreadable))
                logger.warning("gh200: a pack can't be read; its entries are made again: %s", unreadable)
                continue
            except DamagedPack as damaged:
                done.notes.append(damaged.message)
                logger.warning("gh200: %s; its entries are made again", damaged.message)
                self._remove(path)
                continue
            with pack:
                self._load_pack(pack, table, done, copy=copy, workers=workers, tick=tick)
        done.seconds = time.perf_counter() - started
        return done

    def _load_pack(
        self, pack: Pack, table: Table, done: Loaded, *, copy: bool, workers: int, tick: Callable[[], None]
    ) -> None:
        segment = None if copy else Segment.of_file(pack.fd, pack.size, label=table.name)
        number = 0 if segment is None else table.add_segment(segment, file=True)

        def one(entry: PackEntry) -> str:
            source = _unchanged(entry)
            if source is None:
                return "changed"
            key = key_of(entry.path)
            if table.control.slots.get(key) is not None or not table.admits(key):
                return "known"
            if table.allowed is not None and table.control.held + entry.length > table.allowed:
                return "known"
            if segment is None:
                return "alive" if _copy_in(pack, entry, table, source) else "damaged"
            if not pack.check_mapped(entry, segment.bytes_at(entry.offset, entry.length)):
                return "damaged"
            flags = entry.flags & FINITE | ordinary(entry.path)
            payload, layout = Range(number, entry.offset), Range(number, entry.layout_offset)
            slot = Slot.of(payload, entry.length, flags, source, layout)
            return "alive" if table.enter(key, slot, adds=entry.length) else "known"

        def many(stretch: Sequence[PackEntry]) -> list[str]:
            if segment is not None:
                # In one call, without the interpreter's lock: meanwhile another thread checks what is mapped already.
                segment.map_pages(stretch[0].offset, stretch[-1].offset + stretch[-1].length)
            return [one(entry) for entry in stretch]

        # Neighbours stay together: each thread reads its stretch of the file in order.
        part = max(len(pack.entries) // (max(workers, 1) * 8), 1)
        stretches = [pack.entries[at : at + part] for at in range(0, len(pack.entries), part)]
        with ThreadPoolExecutor(max_workers=max(workers, 1), thread_name_prefix="gh200-pack") as pool:
            states = pool.map(many, stretches)
            for entry, state in zip(pack.entries, itertools.chain.from_iterable(states), strict=True):
                self._account(entry, state, done)
                tick()

    def _account(self, entry: PackEntry, state: str, done: Loaded) -> None:
        self._total += entry.length
        if state == "alive":
            done.entries += 1
            done.bytes += entry.length
            self._alive += entry.length
            self._packed[entry.path] = (entry.size, entry.mtime_ns)
        elif state == "damaged":
            done.damaged += 1
        elif state == "changed":
            done.changed += 1

    # -- saving ----------------------------------------------------------------------------------------

    def save(
        self, table: Table, paths: Iterable[str], *, into_one: bool = False, stop: Callable[[], bool] = lambda: False
    ) -> int:
        """Write what the packs lack, or with ``into_one`` one pack of everything; returns the bytes written.

        Another job at it, or a full disk, is no error: then nothing is written. ``stop`` is asked at every entry.
        """
        with self.locked() as ours:
            if not ours:
                logger.info("gh200: packs of %s: another job is writing them", table.name)
                return 0
            self._sweep()
            going_on = itertools.takewhile(lambda _: not stop(), paths)
            wanted = [(path, found) for path in going_on if (found := table.find(path)) is not None]
            everything = into_one or (self._total > 0 and self._alive < self._total * (1 - MOSTLY_DEAD))
            lacking = [(path, found) for path, found in wanted if everything or not self._has(path, found)]
            if not lacking:
                return 0
            old = self.packs()
            written = self._write(lacking, old, stop)
            if written and everything:
                for path in old:
                    self._remove(path)
            return written

    def _write(self, lacking: list[tuple[str, Found]], old: list[Path], stop: Callable[[], bool]) -> int:
        needed = sum(found.slot.length for _, found in lacking)
        free = shutil.disk_usage(self.folder).free
        if free < needed + ROOM_TO_SPARE:
            return self._no_room(needed, free)
        target = self.folder / f"{int(old[-1].stem) + 1 if old else 1:08d}{SUFFIX}"
        try:
            size = write_pack(target, _items(lacking, stop))
        except PackingStopped:
            logger.info("gh200: packs of %s: stopped with the run; what was there stays", self.folder)
            return 0
        except OSError as failed:
            if failed.errno in (errno.ENOSPC, errno.EDQUOT):
                return self._no_room(needed, shutil.disk_usage(self.folder).free)
            raise CacheError(
                f"{target} could not be written: {failed}", remedy="check cache_config.cache_dir"
            ) from failed
        for path, found in lacking:
            self._packed[path] = _size_and_time(found)
        return size

    def _no_room(self, needed: int, free: int) -> int:
        logger.warning(
            "gh200: no pack written to %s: %s needed, %s free; the next start reads SimpleTuner's own files",
            self.folder,
            format_bytes(needed),
            format_bytes(free),
        )
        return 0

    def _has(self, path: str, found: Found) -> bool:
        return self._packed.get(path) == _size_and_time(found)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(fd)

    def _sweep(self) -> None:
        """What a killed writer left; we hold the lock, so nobody is at it."""
        for leftover in self.folder.glob(f".*{SUFFIX}.*.tmp"):
            leftover.unlink(missing_ok=True)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


def _size_and_time(found: Found) -> tuple[int, int]:
    return found.slot.size_and_inode & 0xFFFFFFFFFF, found.slot.mtime_ns


def _unchanged(entry: PackEntry) -> tuple[int, int] | None:
    """The source as a slot knows it, if it is the file that was packed."""
    try:
        found = os.stat(entry.path)
    except OSError:
        return None
    if (found.st_size, found.st_mtime_ns) != (entry.size, entry.mtime_ns):
        return None
    return source_words(found.st_size, found.st_mtime_ns, found.st_ino)


def _copy_in(pack: Pack, entry: PackEntry, table: Table, source: tuple[int, int]) -> bool:
    import numpy as np

    layout = pack.layout(entry)
    payload = np.frombuffer(os.pread(pack.fd, entry.length, entry.offset), np.uint8)
    if layout is None or payload.nbytes != entry.length or xxhash.xxh3_64_intdigest(payload) != entry.checksum:
        return False
    record = Record(layout, entry.length, ((0, payload),), bool(entry.flags & FINITE))
    return table.publish(entry.path, record, source)


class PackingStopped(CacheError):
    """The run is over, so its packs are not worth waiting for."""


def _items(lacking: list[tuple[str, Found]], stop: Callable[[], bool]) -> Iterator[Item]:
    for path, found in lacking:
        if stop():
            raise PackingStopped("packing was stopped")
        yield _item(path, found)


def _item(path: str, found: Found) -> Item:
    size, mtime_ns = _size_and_time(found)
    return Item(path, size, mtime_ns, found.slot.flags & FINITE, found.layout.text, found.payload)
