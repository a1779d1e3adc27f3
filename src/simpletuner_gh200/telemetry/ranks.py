"""Several ranks side by side: who is slow, who waits for data, and what that costs the others. Pure, but for reading.

In data-parallel training ranks wait for each other in every step, so that their steps are about equally long, whoever
is the slow one. What tells them apart is the wait for data, which is a rank's own: while one waits longer than another,
the other waits for it in the exchange of gradients. The difference is time that no rank needed to lose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from simpletuner_gh200.telemetry.reading import FILE, Recorded, rank_files, read_run
from simpletuner_gh200.units import counted


@dataclass(frozen=True)
class RankRow:
    """One rank over the steps that all ranks recorded; seconds are medians of a step."""

    rank: int
    node: str
    step: float
    data_wait: float
    compute: float
    held_up: int
    """Steps in which this rank waited longest for data, so that the others waited for it."""
    resident: float | None


@dataclass(frozen=True)
class RankTable:
    rows: tuple[RankRow, ...]
    steps: int
    """That all of them recorded."""
    imbalance: float
    """Share of the time lost to unequal waits for data: longest less shortest wait of each step."""
    missing: tuple[int, ...] = ()
    """Ranks that belong to the run and of which nothing was found here."""

    @property
    def slowest(self) -> RankRow:
        """The longest steps; where they are equally long, who held up the others most often."""
        typical = median(row.step for row in self.rows)
        longer = [row for row in self.rows if row.step > typical * NOTABLE]
        if longer:
            return max(longer, key=lambda row: row.step)
        return max(self.rows, key=lambda row: (row.held_up, row.data_wait))

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(row.node for row in self.rows))

    @property
    def size(self) -> str:
        return f"{counted(len(self.rows), 'rank')} on {counted(len(self.nodes), 'node')}"

    @property
    def words(self) -> str:
        """Who is slow and what it costs, in a sentence."""
        slow = self.slowest
        where = f" on {slow.node}" if len(self.nodes) > 1 else ""
        missing = f"; nothing was found here of {', '.join(map(str, self.missing))}" if self.missing else ""
        return (
            f"slowest is rank {slow.rank}{where}, which waited longest for data in {slow.held_up} of "
            f"{counted(self.steps, 'step')}; unequal waits cost {self.imbalance:.1%} of the time{missing}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "slowest": self.slowest.rank, "nodes": self.nodes}


NOTABLE = 1.05
"""Steps that much longer than the others' are a rank's own; below that it is the clock's reading."""


def read_ranks(main: Recorded, other_nodes: Sequence[Path] = ()) -> list[Recorded]:
    """The main rank, and those whose files lie next to its own or in ``other_nodes``: output folders of other nodes."""
    folders = (main.path.parent, *(path / name for path in other_nodes for name in ("", FILE.parent)))
    files = [file for folder in folders if folder.is_dir() for file in rank_files(folder)]
    others = {rank.rank: rank for rank in map(read_run, files) if same_run(main, rank)}
    return [main, *(others[number] for number in sorted(others))]


def same_run(main: Recorded, other: Recorded) -> bool:
    """Not what a run before left with more ranks: its last stretch began when the main rank's did."""
    ranks, began, also = main.start.get("ranks"), main.start.get("time"), other.start.get("time")
    known = isinstance(ranks, int) and isinstance(began, int | float) and isinstance(also, int | float)
    return not known or (0 < other.rank < ranks and abs(also - began) < TOGETHER)  # type: ignore[operator]


TOGETHER = 600.0
"""Seconds between the starts of two ranks of one run: clocks of nodes differ, and so do their disks."""


_NEEDED = ("step_seconds", "data_wait_seconds", "compute_seconds")


def rank_table(ranks: Sequence[Recorded], *, latest: int = 0) -> RankTable | None:
    """None where there is only one rank, or no step that all of them recorded. ``latest``: look at so many only."""
    if len(ranks) < 2:
        return None
    # A slice from 0 on is all of it.
    times = [{name: dict(rank.series(name)[-latest:]) for name in _NEEDED} for rank in ranks]
    common = sorted(set.intersection(*(set(series) for of_rank in times for series in of_rank.values())))
    common = common[1:] or common  # the first pays for the others' warm-up
    if not common:
        return None
    waits = {step: [of_rank["data_wait_seconds"][step] for of_rank in times] for step in common}
    longest = Counter(wait.index(max(wait)) for wait in waits.values())
    lost = sum(max(wait) - min(wait) for wait in waits.values())
    whole = sum(max(of_rank["step_seconds"][step] for of_rank in times) for step in common)
    rows = []
    for number, (rank, of_rank) in enumerate(zip(ranks, times, strict=True)):
        step, wait, compute = (median(of_rank[name][step] for step in common) for name in _NEEDED)
        resident = max((value for _step, value in rank.series("host/resident")[-latest:]), default=None)
        node = str(rank.start.get("host") or "?")
        rows.append(RankRow(rank.rank, node, step, wait, compute, longest[number], resident))
    wanted = ranks[0].start.get("ranks")
    missing = set(range(wanted if isinstance(wanted, int) else 0)) - {row.rank for row in rows}
    return RankTable(tuple(rows), len(common), lost / whole if whole > 0 else 0.0, tuple(sorted(missing)))
