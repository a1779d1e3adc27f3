"""A signal in the loop: the window is finished, a checkpoint written, the loop left."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from simpletuner_gh200.seams.preemption import CheckpointWritten, Preemption, job_end


class Trainer:
    """SimpleTuner's trigger, and its loop in short: a turn, two micro-batches, an optimizer step."""

    def __init__(self, *, others: tuple[float, ...] = ()) -> None:
        self._manual_checkpoint_consumer = None
        self.accelerator = SimpleNamespace(num_processes=1 + len(others), device="cpu", reduce=self._reduce)
        self._others = others
        self.saved: list[int] = []
        self.step = 0

    def _reduce(self, flag, reduction):
        assert reduction == "sum"
        return flag + sum(self._others)

    def register_manual_checkpoint_trigger(self, consumer):
        self._manual_checkpoint_consumer = consumer

    def _consume_manual_checkpoint_request(self):
        return bool(self._manual_checkpoint_consumer and self._manual_checkpoint_consumer())

    def _exit_on_signal(self):
        return "went on"

    def train(self, steps, during=lambda step: None):
        while self.step < steps:
            for _micro_batch in range(2):
                self._exit_on_signal()
                during(self.step)
            self.step += 1
            if self._consume_manual_checkpoint_request():
                self.saved.append(self.step)


@pytest.fixture
def preempted():
    made = []

    def make(trainer):
        made.append(Preemption(trainer))
        assert made[-1].install()
        return made[-1]

    yield make
    for preemption in made:
        preemption.uninstall()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_window_is_finished_and_the_checkpoint_is_the_last_thing(preempted, number):
    trainer = Trainer()
    preempted(trainer)
    waiting = [number]
    with pytest.raises(CheckpointWritten):
        trainer.train(9, lambda step: os.kill(os.getpid(), waiting.pop()) if step == 3 and waiting else None)
    assert (trainer.step, trainer.saved) == (4, [4])


def test_a_signal_to_another_rank_counts(preempted):
    trainer = Trainer(others=(0.0, 1.0))
    preempted(trainer)
    with pytest.raises(CheckpointWritten):
        trainer.train(9)
    assert trainer.saved == [1]


def test_without_a_signal_nothing_happens_and_everything_comes_off():
    trainer = Trainer(others=(0.0,))
    own: list[bool] = [True]
    trainer.register_manual_checkpoint_trigger(lambda: bool(own) and own.pop())
    before = trainer._manual_checkpoint_consumer
    preemption = Preemption(trainer)
    preemption.install()
    trainer.train(3)
    preemption.uninstall()
    assert trainer.saved == [1], "a request of somebody else's is still taken"
    assert trainer._manual_checkpoint_consumer is before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "_exit_on_signal" not in vars(trainer)


def test_a_signal_that_comes_twice_is_one_request(preempted):
    """From Slurm, which may signal every process of a job, and from the launcher."""
    trainer = Trainer()
    preempted(trainer)
    waiting = [signal.SIGTERM, signal.SIGTERM]
    with pytest.raises(CheckpointWritten):
        trainer.train(9, lambda step: os.kill(os.getpid(), waiting.pop()) if waiting else None)
    assert (trainer.step, trainer.saved, waiting) == (1, [1], [])


def test_signals_that_somebody_else_has_are_left_to_them():
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        trainer = Trainer()
        preemption = Preemption(trainer)
        assert preemption.install() is False, "a signal would bring no checkpoint"
        preemption.uninstall()
        assert trainer._manual_checkpoint_consumer != preemption._consume
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_release_without_the_trigger_is_left_alone():
    assert Preemption(SimpleNamespace()).install() is False
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("squeue", "end"),
    [
        ("date -d @1700000300 +%FT%T", 1700000300.0),  # preempted, within a grace time
        ("echo N/A", 1700009999.0),
        ("exit 1", 1700009999.0),
        (None, 1700009999.0),
    ],
)
def test_when_slurm_ends_the_job_is_what_it_says_now(tmp_path, monkeypatch, squeue, end):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_end() is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700009999")
    if squeue is not None:
        (tmp_path / "squeue").write_text(f"#!/bin/sh\nPATH={os.defpath}\n{squeue}\n")
        (tmp_path / "squeue").chmod(0o755)
    assert job_end() == end
