"""Several ranks, on one node or more: who is slow, what unequal waits cost, and whose records belong to the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.telemetry.ranks import rank_table, read_ranks
from simpletuner_gh200.telemetry.reading import read_run
from simpletuner_gh200.telemetry.sink import JsonLines


def write_rank(
    folder: Path,
    rank: int,
    waits: list[float],
    *,
    ranks: int = 4,
    step: float = 1.0,
    host: str = "n0",
    at: float = 50.0,
) -> None:
    sink = JsonLines(folder / "gh200" / (f"telemetry.rank{rank}.jsonl" if rank else "telemetry.jsonl"))
    sink.write({"kind": "start", "time": at, "step": 0, "max_steps": 9, "ranks": ranks, "rank": rank, "host": host})
    for number, wait in enumerate(waits, 1):
        times = {"step_seconds": step, "data_wait_seconds": wait, "compute_seconds": step - wait}
        sink.write({"kind": "step", "step": number, **times, "host": {"resident": 1000 + rank}})
    sink.close()


def table(folder: Path, *elsewhere: Path):
    return rank_table(read_ranks(read_run(folder), elsewhere))


def test_who_waits_longest_holds_the_others_up(tmp_path: Path) -> None:
    for rank, wait in ((0, 0.01), (1, 0.01), (2, 0.21), (3, 0.02)):
        write_rank(tmp_path, rank, [9.0, *[wait] * 5], host=f"n{rank // 2}")
    found = table(tmp_path)
    assert found is not None
    assert (found.slowest.rank, found.slowest.node, found.slowest.held_up) == (2, "n1", 5)
    assert found.imbalance == pytest.approx(0.2), "the first step, slow everywhere, is left out"
    assert found.steps == 5 and found.nodes == ["n0", "n1"] and found.missing == ()
    assert found.to_json()["slowest"] == 2


def test_a_rank_whose_steps_are_longer_is_the_slowest_whatever_it_waits(tmp_path: Path) -> None:
    for rank, length in ((0, 1.0), (1, 1.0), (2, 1.0), (3, 1.4)):
        write_rank(tmp_path, rank, [0.3 if rank == 1 else 0.0] * 6, step=length)
    found = table(tmp_path)
    assert found is not None and found.slowest.rank == 3


def test_nodes_that_share_no_folder_are_named_and_joined(tmp_path: Path) -> None:
    write_rank(tmp_path / "a", 0, [0.1] * 4)
    write_rank(tmp_path / "a", 1, [0.1] * 4)
    alone = table(tmp_path / "a")
    assert alone is not None and alone.missing == (2, 3)
    write_rank(tmp_path / "b", 2, [0.1] * 4, host="n1")
    write_rank(tmp_path / "b", 3, [0.1] * 4, host="n1")
    whole = table(tmp_path / "a", tmp_path / "b")
    assert whole is not None and [row.rank for row in whole.rows] == [0, 1, 2, 3]
    assert whole.missing == () and whole.imbalance == 0


def test_what_a_run_before_left_is_not_of_this_one(tmp_path: Path) -> None:
    """A run over four ranks, then one over two in the same folder: records of ranks 2 and 3 are old."""
    for rank in range(4):
        write_rank(tmp_path, rank, [0.5] * 3, at=50)
    for rank in range(2):
        write_rank(tmp_path, rank, [0.0] * 3, at=9000, ranks=2)
    found = table(tmp_path)
    assert found is not None and [row.rank for row in found.rows] == [0, 1]


def test_one_rank_or_no_common_step_makes_no_table(tmp_path: Path) -> None:
    write_rank(tmp_path / "one", 0, [0.1] * 3, ranks=1)
    assert table(tmp_path / "one") is None
    write_rank(tmp_path / "two", 0, [0.1] * 3)
    write_rank(tmp_path / "two", 1, [])
    assert table(tmp_path / "two") is None
