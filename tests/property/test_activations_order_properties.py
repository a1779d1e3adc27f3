"""Whatever the order, sizes and what stays: each thing is fetched once, in time, and never too many of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.model.activations.shape import AHEAD_BYTES, AT_LEAST, AT_MOST, NOTHING, LearnedOrder


@st.composite
def orders(draw: st.DrawFn) -> tuple[LearnedOrder, frozenset[int]]:
    sizes = draw(st.lists(st.integers(1, AHEAD_BYTES), max_size=24))
    asked = draw(st.permutations(range(len(sizes))))[: draw(st.integers(0, len(sizes)))]
    stayed = draw(st.frozensets(st.sampled_from(range(len(sizes))))) if sizes else frozenset()
    return LearnedOrder(sizes, asked), stayed


@given(orders(), st.data())
def test_asked_in_any_order_nothing_is_fetched_twice_or_too_far_ahead(
    given_order: tuple[LearnedOrder, frozenset[int]], data: st.DataObject
) -> None:
    order, stayed = given_order
    ahead = order.ahead(sorted(stayed))
    fetched: list[int] = []
    reached = 0
    for index in data.draw(st.permutations(range(len(order.sizes)))):
        first, until = ahead.window.get(index, NOTHING)
        found = ahead.queue[max(first, reached) : until]
        reached = max(reached, until)
        fetched += found
        assert len(found) <= AT_MOST
    assert len(fetched) == len(set(fetched))
    assert stayed.isdisjoint(fetched)


@given(orders())
def test_in_its_own_order_the_next_two_are_always_there(given_order: tuple[LearnedOrder, frozenset[int]]) -> None:
    order, stayed = given_order
    ahead = order.ahead(sorted(stayed))
    assert ahead.queue == tuple(at for at in order.requested if at not in stayed)
    for index in order.requested:
        passed, until = ahead.window[index]
        assert min(AT_LEAST, len(ahead.queue) - passed) <= until - passed <= AT_MOST
