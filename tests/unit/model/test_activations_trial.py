"""``auto``: both ways take turns, each shape is compared with itself, and what is faster stays."""

from __future__ import annotations

import random

from simpletuner_gh200.model.activations.policy import ENOUGH, PATIENCE, TURN, Comparison, decide


def run(
    trial: Comparison, seconds: dict[str, float], *, shapes: tuple[str, ...] = ("a",), steps: int = 100
) -> list[str]:
    ways = []
    for step in range(steps):
        if trial.verdict is not None:
            break
        way = trial.way()
        ways.append(way)
        shape = shapes[step % len(shapes)]
        trial.took(shape, seconds[way] * (1 + 10 * (shape == "large")))
    return ways


def test_what_is_faster_stays_and_both_say_what_it_gains_or_lost() -> None:
    trial = Comparison()
    ways = run(trial, {"with": 0.75, "without": 1.0})
    assert ways[: 2 * TURN] == ["with"] * TURN + ["without"] * TURN
    assert len(ways) == 2 * TURN * ENOUGH // (TURN - 1), "of each turn all but the first are counted"
    assert trial.verdict is not None and trial.verdict.way == "with"
    assert trial.verdict.gain == 0.25
    assert "25.0% less" in trial.verdict.why
    assert trial.way() == "with"
    slower = Comparison()
    run(slower, {"with": 1.5, "without": 1.0})
    assert slower.verdict is not None
    assert (slower.verdict.way, slower.verdict.gain) == ("without", -0.5)
    assert "50.0% more" in slower.verdict.why


def test_shapes_are_compared_with_themselves() -> None:
    """Every large batch came in a turn with offloading: by the mean of all steps it would look slow."""
    times = {"small": {"with": [1.0, 1.0], "without": [2.0, 2.0]}, "large": {"with": [10.0], "without": [20.0]}}
    verdict = decide(times)  # type: ignore[arg-type]
    assert verdict.way == "with"
    assert verdict.gain == 0.5


def test_one_slow_step_decides_nothing() -> None:
    verdict = decide({"a": {"with": [1.0, 1.0, 60.0], "without": [1.2, 1.2, 1.2]}})  # type: ignore[dict-item]
    assert verdict.way == "with"


def test_steps_that_are_learning_or_first_of_a_turn_are_not_counted() -> None:
    trial = Comparison()
    for _ in range(TURN):
        trial.took("a", 100.0, counts=False)
    first = True
    while trial.verdict is None:
        way = trial.way()
        trial.took("a", 100.0 if first and way == "without" else 1.0 if way == "with" else 2.0)
        first = trial.way() != way
    assert trial.verdict.gain == 0.5


def test_many_shapes_that_come_seldom_are_compared_together() -> None:
    """Twenty buckets, each at random, as datasets of mixed pictures have them; one step holds a validation."""
    trial, pick, ways = Comparison(), random.Random(1), []
    while trial.verdict is None:
        way, shape = trial.way(), pick.randrange(20)
        ways.append(way)
        validation = 500.0 if len(ways) == 30 else 0.0
        trial.took(shape, (1.0 + shape) * (0.8 if way == "with" else 1.0) + validation)
    assert trial.verdict.way == "with"
    assert round(trial.verdict.gain or 0, 6) == 0.2
    assert len(ways) < PATIENCE


def test_without_anything_to_compare_nothing_changes() -> None:
    trial = Comparison()
    for step in range(PATIENCE):
        trial.took(f"shape {step}", 1.0)
    assert trial.verdict is not None
    assert (trial.verdict.way, trial.verdict.gain) == ("without", None)
