"""The staging schedule under any sequence of events: bounds hold, order holds, nobody is ever stuck."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from simpletuner_gh200.memory.staging.pace import LEAST, MOST, Pace, wanted_depth
from simpletuner_gh200.memory.staging.schedule import Schedule, State


class ScheduleMachine(RuleBasedStateMachine):
    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(depth=2, capacity=3)
        self.next_key = 0
        self.copying: list[int] = []
        self.started: list[int] = []
        self.deepest = 2

    @rule(target=keys)
    def submit(self) -> int:
        self.next_key += 1
        queued = self.schedule.count(State.QUEUED)
        state = self.schedule.submit(self.next_key)
        expected = State.DECLINED if self.schedule.closed or queued >= 3 else State.QUEUED
        assert state is expected
        return self.next_key

    @rule()
    def start(self) -> None:
        could = self.schedule.count(State.QUEUED) and self.schedule.ahead < self.schedule.depth
        key = self.schedule.start()
        assert (key is not None) == bool(could and not self.schedule.closed)
        if key is not None:
            assert not self.started or key > self.started[-1], "first come, first served"
            self.started.append(key)
            self.copying.append(key)

    @rule()
    def finish(self) -> None:
        if self.copying:
            key = self.copying.pop(0)
            was_wanted = self.schedule.state(key) is State.COPYING
            assert self.schedule.finish(key) == was_wanted

    @rule(key=keys)
    def consume(self, key: int) -> None:
        claim = self.schedule.claim(key)
        if claim == "wait":
            assert key in self.copying, "a consumer waits only for what the worker is at"
        elif claim != "gone":
            self.schedule.take(key)
            assert self.schedule.claim(key) == "gone"

    @rule(key=keys)
    def cancel(self, key: int) -> None:
        self.schedule.cancel(key)
        assert self.schedule.state(key) is None

    @rule(depth=st.integers(1, 3))
    def change_depth(self, depth: int) -> None:
        self.schedule.depth = depth
        self.deepest = max(self.deepest, depth)

    @rule(chance=st.integers(0, 19))
    def close(self, chance: int) -> None:
        if chance == 19:  # seldom: nothing starts afterwards
            self.schedule.close()
            assert self.schedule.start() is None

    @invariant()
    def bounded(self) -> None:
        assert self.schedule.ahead <= self.deepest
        assert self.schedule.count(State.QUEUED) <= 3


ScheduleMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestSchedule = ScheduleMachine.TestCase


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.integers(1, MOST))
def test_adapted_depth_stays_in_bounds_and_grows_when_the_consumer_waits(
    copy: float, step: float, waited: float, now: int
) -> None:
    depth = wanted_depth(copy, step, waited=waited, now=now)
    assert 1 <= depth <= MOST
    if step > 0 and waited > 0.1 * step:
        assert depth >= min(MOST, now + 1)


def test_pace_follows_measured_times() -> None:
    pace = Pace("auto")
    assert pace.depth == LEAST
    for _ in range(30):
        pace.copied(3.0)
        pace.consumed(1.0, 0.0)
    assert pace.depth == 4
    for _ in range(60):
        pace.copied(0.01)
        pace.consumed(1.0, 0.0)
    assert pace.depth == LEAST
    fixed = Pace(3)
    fixed.copied(100.0)
    assert fixed.consumed(1.0, 50.0) == 3
