"""Entries of packs as those of a table: many together at a start, or the one that is asked for before that got there.

Opening costs what the index costs: its checksum is checked, and nothing else is read. Whether an entry's source file
is still the one that was packed is asked when it is listed; its bytes are read, and checked, when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from simpletuner_gh200.cache.pack import Pack, PackEntry
from simpletuner_gh200.cache.slots import Key, key_of
from simpletuner_gh200.cache.source import Seen, ordinary
from simpletuner_gh200.cache.table import Table

MOST_ENTRIES = 256
"""Neighbours that are looked at together."""

Source = tuple[int, int]
SourceOf = Callable[[PackEntry], Source | None]
"""The file behind an entry as it looks now, if it is the one that was packed."""


def stretches(pack: Pack) -> Iterator[tuple[int, int]]:
    """Numbers of neighbours that are looked at together, as (first, behind the last)."""
    for first in range(0, len(pack), MOST_ENTRIES):
        yield first, min(first + MOST_ENTRIES, len(pack))


def take_many(pack: Pack, numbers: Sequence[int], seen: Sequence[Seen], table: Table) -> list[bool]:
    """List entries, by their numbers in the pack, whose files are as they were: whether each is held now."""
    if not numbers:
        return []
    sources = np.array([one.source for one in seen], np.uint64)
    flags = np.array([one.ordinary for one in seen], np.uint64)
    held: list[bool] = table.publish_packed(pack, pack.rows[list(numbers)], sources, flags).tolist()
    return held


class PackIndex:
    """The indexes of a cache's packs, newest first, for entries that are asked for one by one. Safe in threads."""

    def __init__(self, packs: Sequence[Pack], source_of: SourceOf) -> None:
        self._packs = [(pack, *_sorted(pack)) for pack in packs]
        self._source_of = source_of

    def __len__(self) -> int:
        return sum(len(pack) for pack, *_ in self._packs)

    def take(self, table: Table, path: str) -> bool:
        """List the entry of ``path``, if a pack has it and its file is the one that was packed."""
        key = key_of(path)
        if not table.admits(key) or path in table.damaged:
            return False
        for pack, lows, order in self._packs:
            number = _find(pack, lows, order, key, path)
            source = self._source_of(pack.entry(number)) if number is not None else None
            if number is not None and source is not None:
                return take_many(pack, [number], [Seen(source, ordinary(path))], table)[0]
        return False

    def close(self) -> None:
        packs, self._packs = self._packs, []
        for pack, *_ in packs:
            pack.close()


def _sorted(pack: Pack) -> tuple[np.ndarray, np.ndarray]:
    lows = pack.rows["key_low"]
    order = np.argsort(lows, kind="stable")
    return lows[order], order


def _find(pack: Pack, lows: np.ndarray, order: np.ndarray, key: Key, path: str) -> int | None:
    """The number of the entry of ``path``."""
    at = int(np.searchsorted(lows, np.uint64(key.low)))
    while at < len(lows) and int(lows[at]) == key.low:
        number = int(order[at])
        entry = pack.entry(number)
        if entry.key == key and entry.path == path:
            return number
        at += 1
    return None
