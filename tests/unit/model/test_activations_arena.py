"""Slabs for saved tensors: filled from the front, used again in the next step, never beyond the limit."""

from __future__ import annotations

import pytest

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.model.activations.arena import ALIGNMENT, FIRST_SLAB, Arena

LIMIT = 4 * FIRST_SLAB


def arena(limit: int = LIMIT) -> Arena:
    return Arena(lambda size: Slab.anonymous(size, label="activations"), limit)


def test_ranges_do_not_overlap_and_the_next_step_gets_the_same() -> None:
    made = arena()
    sizes = [100, ALIGNMENT, 3 * ALIGNMENT + 1, 1]
    first = [made.take(size) for size in sizes]
    starts = [place[1] for place in first if place is not None]
    assert all(later - earlier >= size for earlier, later, size in zip(starts, starts[1:], sizes, strict=False))
    for place in first:
        assert place is not None
        made.give(place)
    again = [made.take(size) for size in sizes]
    assert [place[1] for place in again if place is not None] == starts
    assert made.slabs == 1


def test_the_limit_holds() -> None:
    made = arena(limit=10_000)
    assert made.take(9_000) is not None
    assert made.take(2_000) is None
    assert (made.held, made.refused) == (10_000, 1)


def test_it_grows_by_slabs_and_keeps_them() -> None:
    made = arena()
    for _step in range(3):
        places = [made.take(FIRST_SLAB // 2 + 1) for _ in range(3)]
        assert all(place is not None for place in places)
        for place in reversed(places):
            assert place is not None
            made.give(place)
        assert made.slabs == 3
    assert made.in_use == 0


def test_a_graph_that_lives_on_keeps_its_range_and_no_more() -> None:
    made = arena()
    kept = made.take(100)
    large = made.take(FIRST_SLAB)
    assert kept is not None and large is not None
    made.give(large)
    again = made.take(FIRST_SLAB)
    assert again is not None and again[0] is large[0], "the empty slab is used again"
    assert again[0] is not kept[0]


def test_memory_that_is_refused_ends_its_growth(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(size: int) -> Slab:
        raise MemoryRoomError("no memory")

    made = Arena(refuse, LIMIT)
    assert made.take(1) is None
    assert made.take(1) is None
    assert caplog.text.count("no memory") == 1
    assert made.room() == 0
