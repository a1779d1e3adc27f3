"""The order in which memory goes back, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.memory.ceilings import low_mark
from simpletuner_gh200.memory.pressure import PressureValve, Relief
from simpletuner_gh200.units import GIB, MIB

TOTAL = 480 * GIB


def reliefs(done: list[str]) -> list[Relief]:
    shapes = [("small cache", GIB), ("smallest cache", MIB), ("large cache", 90 * GIB)]
    return [Relief(name, lambda size=size: size, lambda name=name: done.append(name)) for name, size in shapes]


def test_the_largest_first() -> None:
    done: list[str] = []
    valve = PressureValve(reliefs(done), settle_seconds=3)
    for now in range(0, 40, 4):
        valve.observe(GIB, TOTAL, now)
    assert done == ["large cache", "small cache", "smallest cache"]
    assert valve.given == done
    assert valve.exhausted


def test_each_step_has_time_to_show_its_effect() -> None:
    done: list[str] = []
    valve = PressureValve(reliefs(done), settle_seconds=3)
    for now in (0.0, 0.5, 2.9):
        valve.observe(GIB, TOTAL, now)
    assert done == ["large cache"]
    valve.observe(GIB, TOTAL, 3.0)
    assert done == ["large cache", "small cache"]


def test_enough_memory_means_nothing_happens() -> None:
    done: list[str] = []
    valve = PressureValve(reliefs(done), settle_seconds=0)
    for now in range(100):
        assert valve.observe(low_mark(TOTAL), TOTAL, now) is None
    assert done == []


def test_it_ends_when_the_pressure_does() -> None:
    done: list[str] = []
    valve = PressureValve(reliefs(done), settle_seconds=0)
    valve.observe(GIB, TOTAL, 0)
    for now in range(1, 50):
        valve.observe(100 * GIB, TOTAL, now)
    assert done == ["large cache"]


@given(st.lists(st.integers(0, 1 << 40), max_size=8))
def test_no_cache_goes_before_a_larger_one(sizes: list[int]) -> None:
    held = [Relief(str(number), lambda size=size: size, lambda: None) for number, size in enumerate(sizes)]
    valve = PressureValve(held, settle_seconds=0)
    given_back = [valve.observe(GIB, TOTAL, now) for now in range(len(sizes))]
    assert [one[1] for one in given_back if one is not None] == sorted(sizes, reverse=True)


def test_sizes_are_those_of_the_moment_not_of_the_start() -> None:
    """A cache that fills in the background holds nothing when training begins."""
    sizes, done = {"grows": 0, "stays": MIB}, []
    valve = PressureValve(
        [Relief(name, lambda name=name: sizes[name], lambda name=name: done.append(name)) for name in sizes],
        settle_seconds=0,
    )
    sizes["grows"] = GIB
    first = valve.observe(GIB, TOTAL, 0)
    assert (*first, done) == ("grows", GIB, ["grows"])
