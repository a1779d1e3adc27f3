"""Bytes with their source: the table that everything else of a plan is read from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

Source = Literal["measured", "computed", "cited", "assumed"]
"""Read from a file or a run; follows from the configuration; published by somebody; our guess, in a stated range."""

Pool = Literal["hbm", "grace", "disk"]
Phase = Literal["load", "cache", "train", "save", "validate"]

POOLS: tuple[Pool, ...] = get_args(Pool)
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Row:
    """``phase`` None: held in every phase."""

    what: str
    pool: Pool
    phase: Phase | None
    bytes: int
    source: Source
    note: str = ""

    @property
    def certain(self) -> bool:
        """Does it count towards what is needed at least?"""
        return self.source != "assumed"

    def to_json(self) -> dict[str, Any]:
        found = {"what": self.what, "pool": self.pool, "phase": self.phase, "bytes": self.bytes, "source": self.source}
        return {**found, "note": self.note} if self.note else found


@dataclass(frozen=True)
class Table:
    rows: tuple[Row, ...]

    def of(self, phase: Phase, pool: Pool) -> Iterator[Row]:
        return (row for row in self.rows if row.pool == pool and row.phase in (None, phase))

    def held(self, phase: Phase, pool: Pool, *, certain: bool = False) -> int:
        """Bytes in a pool during a phase; ``certain``: without what is assumed."""
        return sum(row.bytes for row in self.of(phase, pool) if row.certain or not certain)

    def used(self, pool: Pool, *, certain: bool = False) -> int:
        return max(self.held(phase, pool, certain=certain) for phase in PHASES)

    def worst_phase(self, pool: Pool) -> Phase:
        return max(PHASES, key=lambda phase: self.held(phase, pool))

    def largest(self, phase: Phase, pool: Pool) -> Row | None:
        return max(self.of(phase, pool), key=lambda row: row.bytes, default=None)

    def in_one_pool(self) -> Table:
        """As on a machine whose device has no memory of its own: what would be in HBM is in the host's memory."""
        moved = (
            Row(r.what, "grace" if r.pool == "hbm" else r.pool, r.phase, r.bytes, r.source, r.note) for r in self.rows
        )
        return Table(tuple(moved))


def table(rows: Iterable[Row]) -> Table:
    """Rows of no bytes say nothing."""
    return Table(tuple(row for row in rows if row.bytes > 0))
