from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.caching.pipeline import WorkAhead, WorkBehind, dealt, grouped


def worked(ahead: WorkAhead, workers: int, most: Callable[[], int]) -> list[threading.Thread]:
    """Workers whose results are the file and its weight; ``most`` is asked after every deal."""

    def work() -> None:
        while (piece := ahead.deal()) is not None:
            most()
            ahead.finished(piece, f"result of {piece.file}", piece.cost // 4)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    return threads


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.integers(1, 400), min_size=1, max_size=60),
    ceiling=st.integers(100, 500),
    workers=st.integers(1, 5),
    together=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_every_file_comes_in_order_whatever_is_asked_for(
    weights: list[int], ceiling: int, workers: int, together: int, seed: int
) -> None:
    """Some are passed over, some come twice, one is a surprise; many are claimed at a time, as a batch is read."""
    files = [f"{number}" for number in range(len(weights))]
    weigh = {**dict(zip(files, weights, strict=True)), "surprise": 399}
    ahead = WorkAhead([(file, None) for file in files], ceiling, weigh.__getitem__)
    chance = Random(seed)
    asked = [file for file in files if chance.random() > 0.2]
    asked = [again for file in asked for again in [file] * chance.choice((1, 1, 1, 2))] + ["surprise"]
    seen: list[int] = []
    threads = worked(ahead, workers, lambda: seen.append(ahead.most))
    for start in range(0, len(asked), together):
        pieces = [ahead.claim(file) for file in asked[start : start + together]]
        assert [ahead.result(piece) for piece in pieces] == [f"result of {piece.file}" for piece in pieces]
    ahead.stop()
    for thread in threads:
        thread.join()
    assert max(seen) <= max(ceiling + max(weights), 2 * 399)


def test_no_more_is_in_flight_than_the_ceiling() -> None:
    files = [f"{number}" for number in range(50)]
    ahead = WorkAhead([(file, None) for file in files], 100, lambda _file: 40)
    threads = worked(ahead, 4, lambda: 0)
    for file in files:
        assert ahead.result(ahead.claim(file)) == f"result of {file}"
    ahead.stop()
    for thread in threads:
        thread.join()
    assert 40 <= ahead.most <= 100


def test_a_file_above_the_ceiling_is_worked_on_alone() -> None:
    weights = {"small": 10, "huge": 1000, "last": 10}
    ahead = WorkAhead([(file, None) for file in weights], 100, weights.__getitem__)
    first, huge = ahead.deal(), None
    assert first is not None
    blocked = threading.Thread(target=lambda: results.append(ahead.deal()))
    results: list[Any] = []
    blocked.start()
    ahead.finished(first, "done", 5)
    ahead.result(ahead.claim("small"))
    blocked.join()
    (huge,) = results
    assert huge.file == "huge"
    assert ahead.most == 1000


@pytest.mark.parametrize(
    ("count", "read", "process", "alone"),
    [(5, 2, 3, [4]), (1, 25, 16, [0]), (26, 25, 16, [25]), (3, 1, 1, [0, 1, 2]), (32, 16, 32, [])],
)
def test_which_files_are_processed_alone(count: int, read: int, process: int, alone: list[int]) -> None:
    found = list(grouped([f"{number}" for number in range(count)], read, process))
    assert [number for number, (_file, by_itself) in enumerate(found) if by_itself] == alone


def test_work_behind_is_done_in_order_and_waited_for_by_name() -> None:
    gate, done = threading.Event(), list[str]()
    behind = WorkBehind(2, failed=lambda failure: done.append(str(failure)))

    def fail() -> None:
        raise OSError("disk full")

    behind.hand_over(["a"], lambda: (gate.wait(), behind.wait_for("a"), done.append("a")))
    behind.hand_over(["b"], fail)
    behind.wait_for("c")
    assert done == []
    gate.set()
    behind.wait_for("b")
    assert done == ["a", "disk full"]
    behind.hand_over(["d"], lambda: done.append("d"))
    behind.close()
    assert done == ["a", "disk full", "d"]


def test_whoever_hands_over_too_much_waits() -> None:
    gate, handed = threading.Event(), list[int]()
    behind = WorkBehind(1, failed=lambda failure: None)

    def hand_over() -> None:
        for number in range(3):
            behind.hand_over([str(number)], gate.wait)
            handed.append(number)

    other = threading.Thread(target=hand_over)
    other.start()
    time.sleep(0.05)
    assert handed == [0]
    gate.set()
    other.join()
    behind.close()
    assert handed == [0, 1, 2]
    assert behind.waited > 0


names = st.text("abcdef", min_size=1, max_size=2)


@given(st.lists(st.lists(names, max_size=12), min_size=1, max_size=4), st.sets(names, max_size=20), st.randoms())
def test_every_missing_file_is_dealt_to_one_rank_and_first_to_one_that_trains_on_it(
    shares: list[list[str]], others: set[str], random: Random
) -> None:
    missing = list(others.union(*shares))
    ranks = [dealt(shares, rank, random.sample(missing, len(missing))) for rank in range(len(shares))]
    assert sorted(file for files in ranks for file in files) == sorted(missing)
    for rank, share in enumerate(shares):
        own = ranks[rank][: sum(file in share for file in ranks[rank])]
        assert [file for file in dict.fromkeys(share) if file in own] == own, "in the order of the share"
        assert all(not any(file in before for before in shares[:rank]) for file in own)
        assert not any(file in trained for file in ranks[rank][len(own) :] for trained in shares)
