"""Suites are found by name, and what they measure with is fair."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.bench.sharing import DATASET_RANKS, measure_dataset
from simpletuner_gh200.bench.suite import all_suites, find_suite, interleaved
from simpletuner_gh200.errors import UsageError


def test_every_suite_says_what_it_measures() -> None:
    suites = all_suites()
    assert set(suites) == {"activations", "cache", "hooks", "start", "store"}
    assert all(suite.help.endswith(".") for suite in suites.values())


def test_an_unknown_suite_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="'nope'") as refused:
        find_suite("nope")
    assert "activations, cache, hooks, start, store" in str(refused.value)


def test_candidates_take_turns_and_the_median_counts() -> None:
    now, turns = 0.0, []
    costs = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 4.0, 30.0])}

    def candidate(name: str):
        def work() -> None:
            nonlocal now
            turns.append(name)
            now += next(costs[name])

        return work

    taken = interleaved({name: candidate(name) for name in costs}, repeats=3, clock=lambda: now)
    assert turns == ["a", "b"] * 3
    assert taken == {"a": 2.0, "b": 5.0}


def test_ranks_answer_and_end(tmp_path: Path) -> None:
    found = measure_dataset(tmp_path, 5000, 6)
    assert found["ranks"] == DATASET_RANKS
    assert found["pss_ratio"] > 1
