"""Budgets against a model: whatever is taken and given back, the books agree and no limit is passed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.errors import BudgetExceeded
from simpletuner_gh200.memory.budget import Budget, Reservation

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 2), st.integers(0, 60)),
        st.tuples(st.just("give"), st.integers(0, 30), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_budget_follows_the_model(steps: list[tuple[str, int, int]]) -> None:
    node = Budget("node 0", 100)
    parts = [node.part("latents", 60), node.part("embeds", 50), node.part("rest")]
    limits = [60, 50, 100]
    held: list[tuple[int, Reservation]] = []
    for what, which, size in steps:
        used = [sum(r.size for part, r in held if part == index) for index in range(3)]
        if what == "take":
            fits = used[which] + size <= limits[which] and sum(used) + size <= 100
            if fits:
                held.append((which, parts[which].reserve(size)))
            else:
                with pytest.raises(BudgetExceeded) as refused:
                    parts[which].reserve(size)
                assert refused.value.needed == size
                assert refused.value.allowed < size
        elif held:
            _, reservation = held.pop(which % len(held))
            reservation.release()
            reservation.release()
        expected = [sum(r.size for part, r in held if part == index) for index in range(3)]
        assert [part.used for part in parts] == expected
        assert node.used == sum(expected)
        assert node.peak <= 100
