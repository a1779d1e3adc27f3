"""The packs of one cache: segments on disk, opened newest last, added to, made into one when mostly dead.

Dead is what nobody will want again: an entry whose source file is another now or gone, one that was found damaged,
and one that a newer pack has too. An entry that another configuration made is not.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.pack_place import PackPlace
from simpletuner_gh200.held.segment import (
    FINITE,
    DamagedEntry,
    DamagedSegment,
    Segment,
    SegmentWriter,
    UntrustedSegment,
)
from simpletuner_gh200.held.source import Identity, identify, identities, recognise_rows
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")

MOSTLY_DEAD = 0.5
KEEP_FREE = 0.1
"""Share of the disk that packs leave to others: checkpoints are what a run is for, packs only make a start faster."""

LOOK_EVERY = 64 << 20
"""Others write to the disk too: after so many bytes it is asked again what is free."""

MOST_ENTRIES = 256
"""Neighbours that are looked at together."""

UNKNOWN, ALIVE, CHANGED, DAMAGED = range(4)


class PackingStopped(CacheError):
    """The run is over, so its packs are not worth waiting for."""


class DiskFull(Exception):
    """Writing would take what has to stay free, or the disk refuses it."""


class Item(NamedTuple):
    """An entry as it goes into a pack: where it is, and the file that it is of."""

    segment: Segment
    row: int
    path: str
    identity: Identity | None
    """None: as its row has it."""


class OpenPack:
    """A pack of this configuration, and what is known of its entries."""

    def __init__(self, segment: Segment, state: int = UNKNOWN) -> None:
        self.segment = segment
        self.states = np.full(len(segment), state, np.uint8)


class PackFolder:
    """``folder`` holds nothing but packs of one cache. Safe to use from several jobs at once, on several machines.

    ``made_by``: what of the configuration decides what entries hold.
    ``keep_free``: bytes of the disk that packs leave to others, where that is more than a tenth of it.
    """

    def __init__(self, folder: Path, made_by: str = "", *, keep_free: int = 0) -> None:
        self.folder = folder
        self.made_by = made_by
        self.packs: dict[str, OpenPack] = {}
        """Ours, oldest first."""
        self.of_others = 0
        """Entries that another configuration made: another model, VAE, precision or resolution."""
        self.notes: list[str] = []
        """Packs that can't be read, and why."""
        self._keep_free = keep_free
        self._names: dict[str, int] = {}
        """Every pack that was there, with its inode."""
        self._others: list[str] = []
        self._worthless: list[str] = []
        self._reported_full = False

    # -- reading ---------------------------------------------------------------------------------------

    def open_all(self) -> list[Segment]:
        """Our packs, oldest first: their headers and indexes are read, and nothing else."""
        with PackPlace.open(self.folder) as place:
            self._open_all(place)
        return [pack.segment for pack in self.packs.values()]

    def _open_all(self, place: PackPlace) -> None:
        known, before, self._names = self.packs, self._names, place.packs()
        self.packs, self._others, self._worthless, self.of_others, self.notes = {}, [], [], 0, []
        opened: dict[str, OpenPack] = {}
        for name, inode in self._names.items():
            pack = known.get(name) if before.get(name) == inode else None
            segment = self._open(place, name) if pack is None else pack.segment
            if segment is not None:
                opened[name] = pack or OpenPack(segment)
        for name, pack in opened.items():
            if pack.segment.made_by == self.made_by:
                self.packs[name] = pack
            else:
                self._others.append(name)
                self.of_others += len(pack.segment)

    def _open(self, place: PackPlace, name: str) -> Segment | None:
        try:
            return place.pack(name)
        except FileNotFoundError:
            return None
        except DamagedSegment as damaged:
            self._worthless.append(name)
            reason = damaged.message
        except (UntrustedSegment, OSError) as refused:  # not ours to remove, and no reason to stop
            reason = f"a pack can't be read: {self.folder / name}: {refused}"
        self.notes.append(reason)
        logger.warning("gh200: %s; its entries are made again", reason)
        return None

    def recognise(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Look at the source files of entries that nobody looked at. ``stop`` is asked between neighbours."""
        for pack in self.packs.values():
            waiting = np.flatnonzero(pack.states == UNKNOWN)
            for first in range(0, len(waiting), MOST_ENTRIES):
                if stop():
                    return
                some = waiting[first : first + MOST_ENTRIES].tolist()
                alive = recognise_rows(pack.segment, some)
                pack.states[some] = np.where(alive, ALIVE, CHANGED)

    def report(self) -> dict[str, Any]:
        """What is known of them by now."""
        here = [(pack.segment.rows["length"], pack.states) for pack in self.packs.values()]
        return {
            "entries": sum(int((states <= ALIVE).sum()) for _, states in here),
            "bytes": sum(int(lengths[states <= ALIVE].sum()) for lengths, states in here),
            "changed": sum(int((states == CHANGED).sum()) for _, states in here),
            "of_others": self.of_others,
            "notes": list(self.notes),
        }

    # -- writing ---------------------------------------------------------------------------------------

    def save(self, cache: HeldCache, stop: Callable[[], bool] = lambda: False) -> int:
        """Write what the packs lack of what is in memory: bytes written.

        Another job at it, or a full disk, is no error: then nothing is written. ``stop`` is asked again and again.
        """
        with PackPlace.open(self.folder) as place, place.locked() as ours:
            if not ours:
                logger.info("gh200: packs of %s: another job is writing them", cache.name)
                return 0
            place.sweep()
            if place.packs() != self._names:  # another job has been at it since
                self._open_all(place)
            try:
                written = self._add(place, cache, stop)
            except PackingStopped:
                logger.info("gh200: packs of %s: stopped with the run; what was there stays", self.folder)
                return 0
            except DiskFull as full:
                if not self._reported_full:
                    self._reported_full = True
                    words = "gh200: no pack written to %s: %s; the next start reads SimpleTuner's own files"
                    logger.warning(words, self.folder, full)
                return 0
            self._remove_dead(place)
            return written

    def _add(self, place: PackPlace, cache: HeldCache, stop: Callable[[], bool]) -> int:
        """One more pack: of what is lacking and, where the others are mostly dead, of what is alive in those."""
        self.recognise(stop)
        newest = self._newest(cache)
        items = list(self._lacking(cache, newest))
        replaced = {item.path for item in items}
        kept = [
            Item(pack.segment, row, path, None)
            for path, (pack, row) in newest.items()
            if pack.states[row] == ALIVE and path not in replaced
        ]
        total = sum(int(pack.segment.rows["length"].sum()) for pack in self.packs.values())
        alive = sum(int(item.segment.rows["length"][item.row]) for item in kept)
        if alive < total * (1 - MOSTLY_DEAD):
            items, kept = items + kept, []
        old = {name: pack.segment for name, pack in self.packs.items()}
        size = self._write(place, items, stop) if items else 0
        needed = {id(item.segment) for item in kept}
        for name, segment in old.items():
            if id(segment) not in needed:
                self._worthless.append(name)
                del self.packs[name]
        return size

    def _newest(self, cache: HeldCache) -> dict[str, tuple[OpenPack, int]]:
        """By path, the entry of the newest pack that has one."""
        newest = {}
        for pack in self.packs.values():
            for row in range(len(pack.segment)):
                path = pack.segment.path(row)
                if path in cache.damaged:
                    pack.states[row] = DAMAGED
                newest[path] = pack, row
        return newest

    def _lacking(self, cache: HeldCache, newest: dict[str, tuple[OpenPack, int]]) -> Iterator[Item]:
        """What is in memory, and not in a pack as it is, and whose file is still the one it was taken from."""
        for _, segment, row in cache.shelf.current():
            if segment.is_pack:
                continue
            path, (taken,) = segment.path(row), identities(segment, [row])
            pack, at = newest.get(path, (None, 0))
            if pack is not None and pack.states[at] == ALIVE and _same(pack.segment.rows[at], segment.rows[row]):
                continue
            identity = identify(path, (taken.size, taken.mtime_ns, taken.inode))
            if identity is not None:
                yield Item(segment, row, path, identity)

    def _write(self, place: PackPlace, items: list[Item], stop: Callable[[], bool]) -> int:
        name = place.next_name()
        needed = sum(int(item.segment.rows["length"][item.row]) for item in items)
        written = looked = 0
        with place.new_file(name) as fd:
            writer = SegmentWriter(fd)
            try:
                check_disk(place.fd, needed, self._keep_free)
                for item in items:
                    if stop():
                        raise PackingStopped("packing was stopped")
                    written += put(writer, item)
                    if written - looked >= LOOK_EVERY:
                        check_disk(place.fd, max(needed - written, 0), self._keep_free)
                        looked = written
                size = writer.finish(self.made_by)
            except OSError as failed:
                if failed.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise DiskFull(f"it needs {format_bytes(needed)}, and the disk refuses that") from failed
                raise CacheError(
                    f"{self.folder / name} could not be written: {failed}", remedy="check cache_config.cache_dir"
                ) from failed
        self.packs[name] = OpenPack(place.pack(name), ALIVE)
        self._names = place.packs()
        return size

    def _remove_dead(self, place: PackPlace) -> None:
        for name in [*self._worthless, *(name for name in self._others if self._is_dead(place, name))]:
            try:
                place.remove(name)
            except OSError as refused:
                logger.warning("gh200: %s holds nothing of use and can't be removed: %s", self.folder / name, refused)
        self._worthless = []
        self._names = place.packs()

    def _is_dead(self, place: PackPlace, name: str) -> bool:
        """Of another configuration: may anybody still want something in it?"""
        try:
            segment = place.pack(name)
        except (OSError, CacheError):
            return False
        return not any(recognise_rows(segment, range(len(segment))))


def _same(packed: np.void, held: np.void) -> bool:
    """Was it copied from there, or taken from the very same file?"""
    names = ["size", "mtime_ns", "ctime_ns", "inode"]
    return bool(held["checksum"] and held["checksum"] == packed["checksum"]) or bool(packed[names] == held[names])


def is_whole(segment: Segment, row: int) -> bool:
    try:
        segment.layout(row)
        segment.payload(row)
    except DamagedEntry:
        return False
    return True


def put(writer: SegmentWriter, item: Item) -> int:
    """Bytes written; none where the entry is damaged, which costs the next start that entry."""
    segment, row = item.segment, item.row
    identity = item.identity or identities(segment, [row])[0]
    try:
        payload, layout = segment.payload(row), segment.layout(row)
    except DamagedEntry:
        return 0
    path = item.path.encode("utf-8", "surrogateescape")
    key = segment.rows[["key_low", "key_high"]][row].tobytes()
    flags = int(segment.rows["flags"][row]) & FINITE
    writer.put(key, payload, path=path, layout=layout, flags=flags, **identity._asdict())
    return payload.nbytes


def check_disk(folder: int, needed: int, keep_free: int) -> None:
    """DiskFull where ``needed`` more bytes are too many for the disk that an open folder is on."""
    found = os.fstatvfs(folder)
    free, reserve = found.f_bavail * found.f_frsize, must_stay_free(found.f_blocks * found.f_frsize, keep_free)
    if needed > free - reserve:
        raise DiskFull(
            f"it needs {format_bytes(needed)}, {format_bytes(free)} are free, of which {format_bytes(reserve)} "
            f"stay free for checkpoints"
        )


def must_stay_free(total: int, keep_free: int) -> int:
    """Bytes of a disk of ``total``: a tenth, or ``keep_free`` where that is more."""
    return max(int(total * KEEP_FREE), keep_free)
