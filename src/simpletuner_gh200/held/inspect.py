"""Packs for people: what there is, whether it is whole, or thrown away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import CacheError, UsageError
from simpletuner_gh200.held.pack_place import LOCK, MARKER, SUFFIX, PackPlace
from simpletuner_gh200.held.packs import is_whole
from simpletuner_gh200.held.segment import Segment
from simpletuner_gh200.held.source import recognise_rows


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


def _opened(cache: PackedCache, problems: list[str]) -> Iterator[tuple[Path, Segment]]:
    """Every pack that can be read; why the others can't be."""
    with PackPlace.open(cache.folder) as place:
        for name in place.packs():
            try:
                yield cache.folder / name, place.pack(name)
            except (CacheError, OSError) as refused:
                problems.append(str(refused))


def describe(cache: PackedCache) -> dict[str, Any]:
    """Entries, bytes and packs, and how many entries a start would take."""
    problems: list[str] = []
    segments = [segment for _, segment in _opened(cache, problems)]
    fresh = sum(sum(recognise_rows(segment, range(len(segment)))) for segment in segments)
    return {
        "name": cache.name,
        "source": cache.source,
        "packs": len(segments) + len(problems),
        "entries": sum(map(len, segments)),
        "fresh": fresh,
        "bytes": sum(segment.size for segment in segments),
        "problems": problems,
    }


def verify(cache: PackedCache) -> dict[str, Any]:
    """Read every byte against its checksum."""
    checked, problems = 0, list[str]()
    for path, segment in _opened(cache, problems):
        for row in range(len(segment)):
            checked += 1
            if not is_whole(segment, row):
                problems.append(f"{path}: the entry of {segment.path(row)} is damaged")
    return {"name": cache.name, "checked": checked, "problems": problems}


def drop(cache: PackedCache) -> dict[str, Any]:
    """Delete the packs of one cache: only files that are ours, only in its own folder."""
    with PackPlace.open(cache.folder) as place, place.locked() as alone:
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
