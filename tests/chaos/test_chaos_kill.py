"""kill -9, of every process of a run in every phase: nothing is left running, and the next run goes on.

In `make test` stand for all of them a launcher that is killed, and a second job on the same output folder, in
tests/integration/test_command_line.py.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tests.chaos.laboratory import PHASES
from tests.chaos.representatives import phases

KILLED = 128 + signal.SIGKILL
VICTIMS = ("launcher", "middle", "rank")


def find(command, victim):
    """Its process number, ahead of the moment: looking for it takes longer than some moments last."""
    look = {"launcher": lambda: command.process.pid, "middle": command.middle, "rank": command.rank}[victim]
    command.wait_until(look, f"there was a {victim}")
    return look()


def kill(number):
    """Where it has just ended by itself, the moment came too late to do harm; what follows is checked all the same."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def reach(command, phase):
    if phase == "importing":
        command.wait_until(command.rank, "a rank was there")
    else:
        command.wait_for_words(PHASES[phase])


@pytest.mark.chaos
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("phase", phases("importing", "reading data", "loading the model"))
def test_nothing_outlives_a_kill(laboratory, train, phase, victim):
    command = train(laboratory, "--max_train_steps=4000")
    reach(command, phase)
    kill(find(command, victim))
    ended = command.end_of_all()
    if victim == "launcher":
        assert ended.code == -signal.SIGKILL
        return
    assert ended.code in {KILLED, 1}, ended.explain()
    assert ended.last_line.startswith("gh200: training failed: a rank exited without reporting why while "), (
        ended.explain()
    )


@pytest.mark.chaos
@pytest.mark.only_release("4.")
@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_of_two_ranks_outlives_a_kill(laboratory, train, victim):
    """The one that is left would wait for the other in the middle of a step."""
    command = train(laboratory, "--max_train_steps=4000", "--num_processes=2")
    reach(command, "training")
    kill(find(command, victim))
    ended = command.end_of_all()
    assert ended.code in ({-signal.SIGKILL} if victim == "launcher" else {KILLED, 1}), ended.explain()


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_checkpoint_that_was_being_written_is_not_believed(laboratory, train, victim):
    """The second one: there is a whole one to go back to."""
    steps = "--max_train_steps=4"
    laboratory.configure(checkpoint_step_interval=1)
    command = train(laboratory, steps)
    number, output = find(command, victim), laboratory.project.output
    command.wait_until(lambda: any(output.glob("checkpoint-2*")), "the second checkpoint was begun")
    kill(number)
    command.end_of_all()
    ended = train(laboratory, steps).end()
    assert ended.code == 0, ended.explain()
    assert "trained: 4 of 4 optimizer steps" in ended.err, ended.explain()
    assert (output / "pytorch_lora_weights.safetensors").is_file()


@pytest.mark.chaos
@pytest.mark.parametrize("victim", [pytest.param("launcher", marks=pytest.mark.only_release("4.")), "rank"])
def test_packs_that_were_being_written_are_not_believed(packed, train, victim):
    """Killed as soon as the first byte of a pack is there; the next run trains what an undisturbed one does."""
    for path in packed.packs.iterdir():
        for pack in path.glob("*.pack"):
            pack.unlink()
    command = train(packed)
    number = find(command, victim)
    begun = ("*/.*.pack.*.tmp", "*/*.pack")
    command.wait_until(lambda: any(any(packed.packs.glob(name)) for name in begun), "a pack was begun")
    kill(number)
    command.end_of_all()
    packed.forget_training()
    ended = train(packed).end()
    packed.assert_trained_the_same(ended)
