"""Saving is told apart from training: in the phases of the summary, and in the record of a step."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.seams import loop
from simpletuner_gh200.seams import runtime as runtimes
from simpletuner_gh200.seams.feature import Feature
from simpletuner_gh200.seams.loop import LoopWatch
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.telemetry.measure import StepClock


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    __call__ = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (runtimes, loop):
        monkeypatch.setattr(module, "time", made)
    return made


class Trainer:
    """Each micro-batch takes a second, a checkpoint ten; what follows the loop is up to the test."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.accelerator = SimpleNamespace(accumulate=self._accumulate)

    @contextmanager
    def _accumulate(self) -> Any:
        yield
        self._clock.now += 1

    def checkpoint_state_save(self, output_dir: str, suffix: str | None = None) -> str:
        self._clock.now += 10
        return f"{output_dir}/{suffix}"


class Told(Feature):
    name = "telemetry"

    def __init__(self) -> None:
        self.saved: list[float] = []

    def checkpoint_saved(self, seconds: float) -> None:
        self.saved.append(seconds)


class Disturbed(Told):
    def checkpoint_saved(self, seconds: float) -> None:
        raise ValueError("a feature of ours fails too")


@pytest.fixture
def run(clock: Clock) -> Any:
    runtime, trainer, told = Runtime(Launch()), Trainer(clock), Told()
    runtime.phases = runtimes.Phases(_since=clock.now)
    runtime._on = (told,)
    watch = LoopWatch(trainer, runtime)
    watch.install()
    for _step in range(3):
        with trainer.accelerator.accumulate():
            pass
        assert trainer.checkpoint_state_save("out", suffix="rolling") == "out/rolling"
    clock.now += 5
    return runtime, trainer, told, watch


def test_checkpoints_and_what_follows_the_last_step_are_not_training(run: Any) -> None:
    runtime, trainer, told, watch = run
    watch.conclude(completed=True)
    assert runtime.phases.seconds == {"train": 3.0, "save": 30.0, "finish": 5.0}
    assert told.saved == [10.0, 10.0, 10.0]
    watch.remove()
    assert "checkpoint_state_save" not in vars(trainer)


def test_what_a_failed_run_did_last_is_training(run: Any) -> None:
    runtime, _trainer, _told, watch = run
    watch.conclude(completed=False)
    assert runtime.phases.seconds == {"train": 8.0, "save": 30.0}


def test_a_checkpoint_that_fails_is_timed_and_fails_as_before(run: Any, clock: Clock) -> None:
    runtime, trainer, _told, watch = run
    watch.remove()

    def full(*_words: Any) -> None:
        clock.now += 2
        raise OSError(28, "No space left on device")

    trainer.checkpoint_state_save = full
    runtime._on = (Disturbed(),)
    runtime._moments.clear()
    watch.install()
    with pytest.raises(OSError, match="No space left"):
        trainer.checkpoint_state_save("out")
    assert runtime.phases.seconds["save"] == 32.0


@pytest.mark.parametrize("inside", [True, False])
def test_a_steps_record_has_saving_by_itself(inside: bool) -> None:
    """Inside of a micro-batch or between two: it is neither computing nor waiting."""
    clock = Clock()
    steps = StepClock(clock)
    steps.batch_requested()
    clock.now += 1
    steps.batch_ready(4)
    clock.now += 2
    if inside:
        clock.now += 10
        steps.checkpoint_saved(10)
    steps.batch_done()
    steps.batch_requested()
    if not inside:
        clock.now += 10
        steps.checkpoint_saved(10)
    clock.now += 3
    steps.batch_ready(4)
    times = steps.step_done()
    assert (times.seconds, times.data_wait, times.compute, times.saving) == (16, 4, 2, 10)
    assert times.other == 0
