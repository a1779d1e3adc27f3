"""A full disk, recognised in whatever exception it comes as, and named."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator

from simpletuner_gh200.config.environment import text
from simpletuner_gh200.units import MIB, format_bytes

FULL = 16 * MIB
"""Less than this is free on a disk that a checkpoint did not fit on."""

_SIGNS = (
    "No space left on device",
    "StorageFull",
    "Disk quota exceeded",
    "PytorchStreamWriter failed",
    "iostream error",
)
"""Of safetensors and of torch, whose writer forgets the cause."""


def disk_full(failure: BaseException, places: Iterable[str]) -> str | None:
    """Which disk is full, if that is what ``failure`` comes from; None otherwise."""
    chain = list(_chain(failure))
    certain = any(isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT) for each in chain)
    if not certain and not any(sign in str(each) for each in chain for sign in _SIGNS):
        return None
    named = [str(each.filename) for each in chain if isinstance(each, OSError) and isinstance(each.filename, str)]
    for place in (*named, *places, os.getcwd(), text("TMPDIR") or "/tmp"):
        free = _free(place)
        if free is not None and free < FULL:
            return f"the disk of {place} is full ({format_bytes(free)} left)"
    return "a disk is full, or its quota used up" if certain else None


def _chain(failure: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = failure
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _free(place: str) -> int | None:
    """Of the nearest folder above ``place`` that exists."""
    path = os.path.abspath(place)
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
