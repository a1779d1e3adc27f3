"""Packs for people: what there is, whether it is whole, made again, or thrown away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import fill
from simpletuner_gh200.cache.listing import cache_files
from simpletuner_gh200.cache.pack import Pack
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.pack_place import LOCK, MARKER, SUFFIX, PackPlace
from simpletuner_gh200.cache.source import Recognizer
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.errors import CacheError, UsageError


@dataclass(frozen=True)
class PackedCache:
    """One cache under a ``cache_dir``."""

    name: str
    folder: Path
    source: str
    """Where SimpleTuner's own files are."""


def packed_caches(root: Path, names: list[str] | None = None) -> list[PackedCache]:
    """Every cache with packs under ``root``, or just those named; UsageError for a name that isn't there."""
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder", remedy="name the cache_config.cache_dir of a run")
    found = list(_marked(root))
    known = {cache.name for cache in found}
    for name in names or ():
        if name not in known:
            raise UsageError(f"no cache {name!r} in {root}", remedy=f"there are: {', '.join(sorted(known)) or 'none'}")
    return [cache for cache in found if not names or cache.name in names]


def _marked(root: Path) -> Iterator[PackedCache]:
    for folder in sorted(root.iterdir()):
        try:
            with PackPlace.open(folder) as place:
                source = place.marked()
        except (CacheError, OSError):  # no folder, or not one of ours
            continue
        if source is not None and os.path.isabs(source):  # else it says nothing, or nothing that we wrote
            yield PackedCache(folder.name, folder, source)


def describe(cache: PackedCache) -> dict[str, Any]:
    """Entries, bytes and packs, and how many entries a start would take."""
    entries = fresh = size = 0
    problems = []
    packs, recognizer = PackFolder(cache.folder).packs(), Recognizer()
    for path in packs:
        try:
            with Pack(path) as pack:
                entries += len(pack)
                fresh += sum(recognizer.source(entry.path, entry.identity) is not None for entry in pack.entries())
                size += pack.size
        except (CacheError, OSError) as refused:
            problems.append(str(refused))
    return {
        "name": cache.name,
        "source": cache.source,
        "packs": len(packs),
        "entries": entries,
        "fresh": fresh,
        "bytes": size,
        "problems": problems,
    }


def verify(cache: PackedCache) -> dict[str, Any]:
    """Read every byte against its checksum."""
    checked, problems = 0, []
    for path in PackFolder(cache.folder).packs():
        try:
            with Pack(path) as pack:
                for entry in pack.entries():
                    checked += 1
                    if pack.payload(entry) is None:
                        problems.append(f"{path}: the entry of {entry.path} is damaged")
        except (CacheError, OSError) as refused:
            problems.append(str(refused))
    return {"name": cache.name, "checked": checked, "problems": problems}


def pack_again(cache: PackedCache, *, workers: int) -> dict[str, Any]:
    """One pack of everything that is on disk now: dead entries go, missing ones are taken in."""
    paths = list(cache_files(cache.source).paths())
    table = Table(cache.name, Control.create(len(paths) + 256, label=cache.name, shared=False), look_for_nan=True)
    packs = PackFolder(cache.folder, made_by=None)
    try:
        packs.look_over(closely=True)  # what is damaged is made anew, not just left out
        if packs.made_by is None:
            nobody = (
                f"{cache.folder}: no pack there says which configuration the entries are of; a run makes packs anew"
            )
            return {
                "name": cache.name,
                "entries": 0,
                "problems": [nobody],
                "from_packs": 0,
                "bytes": 0,
                "fallbacks": {},
            }
        from_packs = len(packs.held)
        fill(table, [path for path in paths if path not in packs.held], workers=workers)
        written = packs.save(table, paths, into_one=True)
        entries = len(packs.held) if written else from_packs + sum(1 for _ in table.control.slots.entries())
        failed = f"{cache.folder}: nothing was written; another job is at it, or the disk is full (see the log)"
        return {
            "name": cache.name,
            "entries": entries,
            "problems": [failed] if entries and not written else [],
            "from_packs": from_packs,
            "bytes": written,
            "fallbacks": table.statistics.fallbacks,
        }
    finally:
        table.close()


def drop(cache: PackedCache) -> dict[str, Any]:
    """Delete the packs of one cache: only files that are ours, only in its own folder."""
    with PackFolder(cache.folder).locked() as alone:
        if not alone:
            problem = f"{cache.folder}: another job is writing there; nothing was deleted"
            return {"name": cache.name, "packs": 0, "bytes": 0, "problems": [problem]}
        return _delete(cache)


def _delete(cache: PackedCache) -> dict[str, Any]:
    removed = size = 0
    ours = [*cache.folder.glob(f"*{SUFFIX}"), *cache.folder.glob(f".*{SUFFIX}.*.tmp")]
    problems = []
    for path in [*ours, cache.folder / LOCK, cache.folder / MARKER]:
        try:
            found = path.lstat().st_size
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as refused:  # a folder of that name, say
            problems.append(str(refused))
            continue
        size += found
        removed += path.name.endswith(SUFFIX)
    if not os.listdir(cache.folder):
        cache.folder.rmdir()
    return {"name": cache.name, "packs": removed, "bytes": size, "problems": problems}
