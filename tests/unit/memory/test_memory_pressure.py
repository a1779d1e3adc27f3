"""The order in which memory goes back, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.memory.ceilings import low_mark
from simpletuner_gh200.memory.pressure import PressureValve, Relief, in_order
from simpletuner_gh200.units import GIB, MIB

TOTAL = 480 * GIB


def reliefs(done: list[str]) -> list[Relief]:
    shapes = [("small cache", GIB), ("smallest cache", MIB), ("large cache", 90 * GIB)]
    return [Relief(name, size, lambda name=name: done.append(name)) for name, size in shapes]


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
    ordered = in_order(Relief(str(number), size, lambda: None) for number, size in enumerate(sizes))
    assert [relief.size for relief in ordered] == sorted(sizes, reverse=True)
