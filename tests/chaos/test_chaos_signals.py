"""Signals to a run: it ends soon, says what is kept, and leaves nothing; those that are ignored stay ignored.

In `make test` tests/integration stands for them: test_command_line.py, and for SIGTERM test_ramp_resumed_runs.py.
"""

from __future__ import annotations

import signal

import pytest

from tests.chaos.laboratory import PHASES
from tests.chaos.representatives import phases

MANY = "--max_train_steps=4000"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@pytest.mark.chaos
def test_terminated_at_its_second_checkpoint(laboratory, train):
    """SIGTERM asks for a checkpoint; 75: try again."""
    laboratory.configure(checkpoint_step_interval=1)
    command = train(laboratory, MANY)
    command.wait_until((laboratory.project.output / "checkpoint-2").is_dir, "the second checkpoint")
    command.send(signal.SIGTERM)
    ended = command.end_of_all()
    assert "with: gh200 train" in ended.last_line, ended.explain()
    assert ended.code == (75 if "stopped after a checkpoint" in ended.last_line else 143), ended.explain()


@pytest.mark.chaos
@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
@pytest.mark.parametrize("phase", phases("importing", "reading data"))
def test_a_signal_ends_every_phase(laboratory, train, phase, number):
    command = train(laboratory, MANY)
    command.wait_until(command.rank, "a rank was there")
    if phase != "importing":
        command.wait_for_words(PHASES[phase])
    command.send(number)
    ended = command.end_of_all()
    expected = {75, 128 + number} if number == signal.SIGTERM else {128 + number}
    assert ended.code in expected, ended.explain()
    assert "with: gh200 train" in ended.last_line, ended.explain()


@pytest.mark.chaos
def test_a_second_signal_ends_the_patience(laboratory, train):
    command = train(laboratory, MANY, "--checkpoint-on-interrupt")
    command.wait_for_words(PHASES["training"])
    command.send(signal.SIGINT)
    command.send(signal.SIGINT)
    ended = command.end_of_all()
    assert ended.code in {75, 130}, ended.explain()


@pytest.mark.chaos
@pytest.mark.only_release("4.")
def test_nohup_survives_the_logout(packed, train):
    command = train(packed, through=["nohup"])
    command.wait_until(command.rank, "a rank was there")
    command.send(signal.SIGHUP)
    command.wait_for_words(PHASES["reading data"])
    command.send(signal.SIGHUP)
    packed.assert_trained_the_same(command.end_of_all())


@pytest.mark.chaos
@pytest.mark.only_release("4.")
@pytest.mark.parametrize("phase", ["loading the model", "training"])
def test_two_ranks_end_together(laboratory, train, phase):
    """Each may be waiting for the other, deep in a call that knows no signals."""
    command = train(laboratory, MANY, "--num_processes=2")
    command.wait_for_words(PHASES[phase])
    command.send(signal.SIGINT)
    ended = command.end_of_all()
    assert ended.code == 128 + signal.SIGINT, ended.explain()
    assert "with: gh200 train" in ended.last_line, ended.explain()


@pytest.mark.chaos
@pytest.mark.only_release("4.")
def test_interrupted_while_packs_are_written(packed, train):
    """Whether it came before the last pack or just behind it, the next run trains the same."""
    for pack in packed.packs.glob("*/*.pack"):
        pack.unlink()
    command = train(packed)
    command.wait_until(
        lambda: any(packed.packs.glob("*/.*.pack.*.tmp")) or any(packed.packs.glob("*/*.pack")), "a pack"
    )
    command.send(signal.SIGINT)
    ended = command.end_of_all()
    assert ended.code in {0, 128 + signal.SIGINT}, ended.explain()
    packed.forget_training()
    again = train(packed).end()
    packed.assert_trained_the_same(again)
    assert not list(packed.packs.rglob("*.tmp")), "what was begun is swept"
