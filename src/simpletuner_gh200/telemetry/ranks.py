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

from simpletuner_gh200.telemetry.reading import FILE, Point, Recorded, rank_files, read_run
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


def read_ranks(main: Recorded, elsewhere: Sequence[Path] = ()) -> list[Recorded]:
    """The main rank, and those whose files lie beside its own or in ``elsewhere``: output folders of other nodes."""
    folders = (main.path.parent, *(path / name for path in elsewhere for name in ("", FILE.parent)))
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


def rank_table(ranks: Sequence[Recorded], *, latest: int | None = None) -> RankTable | None:
    """None where there is only one rank, or no step that all of them recorded. ``latest``: look at so many only."""
    if len(ranks) < 2:
        return None
    steps = [_by_step(rank, latest) for rank in ranks]
    common = sorted(set.intersection(*(set(by_step) for by_step in steps)))
    common = common[1:] or common  # the first pays for the others' warm-up
    if not common:
        return None
    waits = [{step: by_step[step]["data_wait_seconds"] for step in common} for by_step in steps]
    longest = Counter(max(range(len(ranks)), key=lambda n: waits[n][step]) for step in common)
    lost = sum(max(wait[step] for wait in waits) - min(wait[step] for wait in waits) for step in common)
    whole = sum(max(by_step[step]["step_seconds"] for by_step in steps) for step in common)
    rows = tuple(
        _row(rank, by_step, common, longest[n], latest)
        for n, (rank, by_step) in enumerate(zip(ranks, steps, strict=True))
    )
    wanted = ranks[0].start.get("ranks")
    missing = set(range(wanted if isinstance(wanted, int) else 0)) - {row.rank for row in rows}
    return RankTable(rows, len(common), lost / whole if whole > 0 else 0.0, tuple(sorted(missing)))


_NEEDED = ("step_seconds", "data_wait_seconds", "compute_seconds")


def _by_step(rank: Recorded, latest: int | None) -> dict[int, dict[str, float]]:
    series = {name: dict(_last(rank.series(name), latest)) for name in _NEEDED}
    return {step: {name: series[name][step] for name in _NEEDED} for step in series[_NEEDED[0]] if _whole(series, step)}


def _last(points: list[Point], latest: int | None) -> list[Point]:
    return points if latest is None else points[-latest:]


def _whole(series: dict[str, dict[int, float]], step: int) -> bool:
    return all(step in values for values in series.values())


def _row(
    rank: Recorded, by_step: dict[int, dict[str, float]], common: Sequence[int], held_up: int, latest: int | None
) -> RankRow:
    step, wait, compute = (median(by_step[number][name] for number in common) for name in _NEEDED)
    resident = [value for _step, value in _last(rank.series("host/resident"), latest)]
    node = str(rank.start.get("host") or "?")
    return RankRow(rank.rank, node, step, wait, compute, held_up, max(resident) if resident else None)
