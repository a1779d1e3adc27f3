"""One cache as this process finds it: entries whose files are as they were, and hits that may be written to.

>>> cache = HeldCache.alone("vae-photos")
>>> value = cache.get(path)            # MISSING, or what torch.load would return

Every rank sees for itself whether a file is still the one that was taken in; an entry whose file is another leaves the
rank's own shelf. What is not held is SimpleTuner's to read, and wished for: see ``caches``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from simpletuner_gh200.held.buffers import BufferPool
from simpletuner_gh200.held.record import parse, tensor_maker, tensor_on
from simpletuner_gh200.held.segment import FINITE, Bytes, DamagedEntry, Segment, key_of
from simpletuner_gh200.held.shelf import Board, Shelf
from simpletuner_gh200.held.source import Identity, Source, is_still, normal


@dataclass
class Statistics:
    """What one cache did in this process, and what its node holds. Plain counts, since every hit adds one: a thread may
    lose one to another, which people don't mind and nothing is decided by."""

    hits: int = 0
    misses: int = 0
    """Entries that SimpleTuner read from its file, or made since there was none yet."""
    stale: int = 0
    """Entries found changed on disk by someone else, counted among the misses too."""
    published: int = 0
    batched: int = 0
    """Hits that went straight into a batch."""
    fill_seconds: float = 0.0
    expected_hit_rate: float = 1.0
    fallbacks: Counter[str] = field(default_factory=Counter)
    declined: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fall_back(self, reason: str, count: int = 1) -> None:
        """So many values were left to SimpleTuner's own load."""
        with self._lock:
            self.fallbacks[reason] += count

    def miss(self, reason: str) -> None:
        """An entry that was asked for could not be handed out, and SimpleTuner reads its file."""
        self.misses += 1
        self.fall_back(reason)

    def decline(self, reason: str) -> None:
        """A batch was left to SimpleTuner's own collate, which asks for its entries one by one."""
        with self._lock:
            self.declined[reason] += 1

    @property
    def hit_rate(self) -> float | None:
        reads = self.hits + self.misses
        return self.hits / reads if reads else None

    def report(self, *, entries: int, held: int) -> dict[str, Any]:
        rate = self.hit_rate
        return {
            "entries": entries,
            "bytes": held,
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": round(rate, 6) if rate is not None else None,
            "expected_hit_rate": round(self.expected_hit_rate, 6),
            "batched": self.batched,
            "declined_batches": dict(self.declined),
            "stale": self.stale,
            "published": self.published,
            "fallbacks": dict(self.fallbacks),
            "fill_seconds": round(self.fill_seconds, 3),
        }


logger = logging.getLogger("simpletuner_gh200")

MISSING: Any = object()
"""What ``get`` returns on a miss: None is a value that can be cached."""

DAMAGED = "damaged in its pack"

REMEMBER_FROM = 16 * 1024
"""Entries of at least this size are remembered by path, at some 400 bytes each: two percent of them at most."""


class Found:
    """An entry at hand, with the segment that holds its payload; that stays as long as this object lives."""

    __slots__ = ("address", "finite", "layout", "length", "offset", "path", "row", "segment", "source")

    def __init__(self, path: str, segment: Segment, row: int) -> None:
        one = segment.rows[row]
        self.path, self.segment, self.row = path, segment, row
        self.layout = parse(segment.layout(row))
        self.offset, self.length = int(one["offset"]), int(one["length"])
        self.address = None if segment.address is None else segment.address + self.offset
        """None: on disk, in a pack."""
        self.finite = bool(one["flags"] & FINITE)
        looked = int(one["size"]), int(one["mtime_ns"]), int(one["inode"])
        self.source: Source | None = None if segment.is_pack else looked
        """How the file looked that was taken in; None until a pack's was recognised."""

    @property
    def payload(self) -> Bytes:
        """Not to be written to. Raises DamagedEntry where it is in a pack and not as written."""
        return self.segment.payload(self.row)

    def copy_into(self, target: Bytes, skip: int) -> None:
        """As much of it as ``target`` holds, from ``skip`` on. Raises DamagedEntry too."""
        if self.address is not None:
            target[:] = self.segment.bytes_at(self.offset + skip, target.nbytes)
        else:
            self.segment.copy_into(target, self.row, skip)


class HeldCache:
    """Safe from several threads."""

    def __init__(self, name: str, shelf: Shelf, *, look_for_nan: bool = False) -> None:
        self.name = name
        self.shelf = shelf
        self.look_for_nan = look_for_nan
        self.statistics = Statistics()
        self.damaged: set[str] = set()
        """Paths whose entries in packs turned out not to be what was written."""
        self.wish: Callable[[str], None] = lambda _path: None
        """Told of files that were asked for, or made, and are not held."""
        self._buffers = BufferPool()
        self._remembered: dict[str, Found] = {}

    @classmethod
    def alone(cls, name: str, *packs: Segment, look_for_nan: bool = False) -> HeldCache:
        """Of a process that shares it with no other."""
        cache = cls(name, Shelf(Board.create(), rank=0, attach=Segment.in_memory), look_for_nan=look_for_nan)
        for pack in packs:
            cache.shelf.add(pack)
        return cache

    @property
    def held_bytes(self) -> int:
        """Of memory, of all ranks of the node."""
        return sum(segment.held_bytes for segment in self.shelf.segments if not segment.is_pack)

    # -- finding ---------------------------------------------------------------------------------------

    def find(self, path: str) -> Found | None:
        """The entry of a normal path, if it is held and its file is as it was when it was taken."""
        found = self.find_all([path])
        return None if found is None else found[0]

    def find_all(self, paths: Sequence[str]) -> list[Found] | None:
        """Every normal path's entry, or None if one is missing. Counts nothing: the caller knows what became of it."""
        if self.shelf.refresh():
            self._remembered = {}
        entries: list[Found] = []
        for path in paths:
            found = self._remembered.get(path) or self._look_up(path)
            if found is None or not self._check(found):
                return None
            entries.append(found)
        return entries

    def _look_up(self, path: str) -> Found | None:
        """The entry that is held under ``path``, whatever its file looks like."""
        place = self.shelf.get(key_of(path))
        if place is None:
            return None
        try:
            found = Found(path, *place)
        except DamagedEntry as damaged:
            self.lose(path, damaged)
            return None
        if found.length >= REMEMBER_FROM:
            self._remembered[path] = found
        return found

    def _check(self, found: Found) -> bool:
        """Is the file as it was when its entry was taken? If not, the entry goes."""
        now = _look_at(found.path)
        if found.source is None:
            known = Identity(*found.segment.rows[found.row].item()[2:7])
            found.source = now if is_still(found.path, known) else None
        if now is None or now != found.source:
            self.statistics.stale += 1
            self.forget(found.path)
            return False
        return True

    def get(self, path: Any) -> Any:
        """A fresh value the caller may do anything with, or MISSING."""
        value, found = MISSING, self.find(normal(path))
        if found is not None:
            try:
                value = self.value_of(found)
            except DamagedEntry as damaged:
                self.lose(found.path, damaged)
        if value is MISSING:
            self.statistics.misses += 1
        else:
            self.statistics.hits += 1
        return value

    def value_of(self, found: Found) -> Any:
        """Copied: into memory that is used again, where it is much, since fresh pages would cost more than the copy."""
        data, single = self._buffers.get(found.length), found.layout.single
        found.copy_into(data, 0)
        return found.layout.build(tensor_maker(data)) if single is None else tensor_on(data, single, single.offset)

    # -- letting go ------------------------------------------------------------------------------------

    def forget(self, path: Any) -> bool:
        """In this process; True if there was an entry. Other ranks see by the file itself that it is another."""
        path = normal(path)
        key = key_of(path)
        held = key in self.shelf
        self.shelf.forget(key)
        self._remembered.pop(path, None)
        return held

    def lose(self, path: str, damaged: DamagedEntry) -> None:
        """An entry of a pack is not what was written: it goes, and SimpleTuner's own file is read."""
        if not self.damaged:
            logger.warning(
                "gh200: cache %s: %s; entries like this are read from SimpleTuner's own files, and counted",
                self.name,
                damaged,
            )
        self.damaged.add(path)
        self.statistics.fall_back(DAMAGED)
        self.forget(path)

    def drop(self) -> None:
        """Find nothing of what is held now; the memory goes back once nobody looks at it."""
        self.shelf.clear()
        self._remembered = {}

    def report(self) -> dict[str, Any]:
        return self.statistics.report(entries=len(self.shelf), held=self.held_bytes)

    def close(self) -> None:
        """Every lookup misses from now on; memory goes with the last value that was handed out."""
        self.drop()


def _look_at(path: str) -> Source | None:
    """How a file looks now; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
