"""Fetching ahead along the learned order: two to four things, by bytes, each once; nothing on a surprise."""

from __future__ import annotations

from simpletuner_gh200.model.activations.shape import AHEAD_BYTES, LearnedOrder

SWAPPED = [5, 4, 2, 3, 1, 0]


def walk(sizes: list[int], asked: list[int], kept: frozenset[int] = frozenset()) -> list[list[int]]:
    """What is fetched at each asking, but for the very first."""
    ahead = LearnedOrder(sizes, asked).ahead(sorted(kept))
    fetched, found = 0, []
    for index in asked:
        passed, until = ahead.window[index]
        found.append(list(ahead.queue[max(passed, fetched) : until]))
        fetched = max(fetched, until)
    return found


def test_small_things_come_four_ahead_in_the_order_of_asking() -> None:
    assert walk([1] * 6, SWAPPED) == [[4, 2, 3, 1], [0], [], [], [], []]


def test_large_things_come_two_ahead() -> None:
    assert walk([AHEAD_BYTES] * 6, SWAPPED) == [[4, 2], [3], [1], [0], [], []]


def test_what_is_in_hbm_is_passed_over() -> None:
    assert walk([AHEAD_BYTES] * 6, SWAPPED, frozenset({4, 2})) == [[3, 1], [], [], [0], [], []]


def test_asked_twice_counts_once() -> None:
    assert LearnedOrder([1, 1], [1, 0, 1]).requested == (1, 0)


def test_a_walk_beforehand_is_kept_as_long_as_the_same_things_stay() -> None:
    order = LearnedOrder([1] * 6, SWAPPED)
    ahead = order.ahead([4])
    assert ahead.queue == (5, 2, 3, 1, 0), "what stays is never fetched"
    assert ahead.window == {5: (1, 5), 4: (1, 5), 2: (2, 5), 3: (3, 5), 1: (4, 5), 0: (5, 5)}
    assert order.ahead([4]) is ahead
    assert order.ahead([]).queue == tuple(SWAPPED)
