"""kill -9 of each rank while it saves: whatever is left of the checkpoint, the run that follows trains the same bits.

Each trial kills one run after another, at one moment after another of the same save, and lets the last one finish. For
all of it stands, in `make test`, what tests/integration/test_ramp_resumed_runs.py leaves in the way of a resume.
"""

from __future__ import annotations

import os
import shutil
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from simpletuner_gh200.operate.preflight import PLACES_KEPT
from tests.chaos.commands import PATIENCE
from tests.chaos.laboratory import STEPS
from tests.chaos.test_chaos_kill import kill

FIRST, LATER = STEPS // 2, STEPS
BEGUN, WEIGHTS, OPTIMIZER = "", "pytorch_lora_weights.safetensors", "optimizer.bin"
"""As soon as which file of a checkpoint is there; the first is its folder."""


def rank_of(command, number):
    """The process of a rank, as its environment says."""
    mark = f"RANK={number}".encode()
    ranks = [process for process, words in command.processes().items() if "simpletuner_gh200.launch" in words]
    own = [process for process in ranks if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")]
    return own[0] if own else None


def find(command, number, ranks):
    look = command.rank if ranks == 1 else lambda: rank_of(command, number)
    command.wait_until(look, f"there was a rank {number}")
    return look()


def kill_while_saving(command, victim, checkpoint, file):
    """Without a pause between two looks: the moments of a small checkpoint are short. Returns what was there then."""
    moment, draft = checkpoint / file, checkpoint.with_name(f"{checkpoint.name}-tmp") / file
    deadline = time.monotonic() + PATIENCE
    while not (os.path.exists(moment) or os.path.exists(draft)):
        assert time.monotonic() < deadline, f"never: {moment}\n{command.said()[-6000:]}"
    kill(victim)
    ended = command.end()
    assert ended.code != 0, f"{moment} came too late\n{ended.explain()}"
    assert command.nothing_left() == ""
    return sorted(path.name for path in checkpoint.glob("*"))


def endure(laboratory, train, step, kills, ranks):
    """Kill a run at each of the moments, one after another; what was left of the checkpoint each time."""
    left = []
    for number, file in kills:
        command = train(laboratory, f"--num_processes={ranks}")
        victim = find(command, number, ranks)
        left.append(kill_while_saving(command, victim, laboratory.project.output / f"checkpoint-{step}", file))
        if step == FIRST or forgets_the_order():
            laboratory.index_again()  # SimpleTuner shuffles its index of images in every run
    return left


def forgets_the_order():
    """Does SimpleTuner go on in another order of the images than the one it stopped in, with or without us?"""
    return Version(version("simpletuner")) < PLACES_KEPT


def undisturbed(laboratory, train, ranks, step):
    if ranks == 1 and not (step == LATER and forgets_the_order()):
        return laboratory.reference_bits()
    if ranks == 1:  # then: a run that went on from the same checkpoint, and was left alone
        name = f"checkpoint-{FIRST}"
        shutil.copytree(laboratory.reference.output / name, laboratory.project.output / name)
    ended = train(laboratory, f"--num_processes={ranks}").end()
    assert ended.code == 0, ended.explain()
    bits = laboratory.bits()
    laboratory.put_packs_back()
    return bits


ONE = [(0, BEGUN), (0, WEIGHTS), (0, OPTIMIZER), (0, "random_states_0.pkl")]
TWO = [(0, BEGUN), (1, BEGUN), (0, "random_states_1.pkl"), (0, WEIGHTS), (1, "random_states_0.pkl")]
FEW = [(0, BEGUN), (0, WEIGHTS), (1, BEGUN)]
"""Of a release in which the first rank writes for all; resumed, its other ranks train other samples."""


def case(ranks, step, kills, name, *marks):
    return pytest.param(ranks, step, kills, id=name, marks=marks)


NEW, OLD = pytest.mark.only_release("4."), pytest.mark.only_release("3.")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("ranks", "step", "kills"),
    [
        case(1, FIRST, ONE, "one rank, first save"),
        case(1, LATER, ONE, "one rank, later save"),
        case(2, FIRST, TWO, "two ranks, first save", NEW),
        case(2, LATER, TWO, "two ranks, later save", NEW),
        case(2, FIRST, FEW, "one rank for two, first save", OLD),
    ],
)
def test_whatever_a_kill_leaves_of_a_checkpoint_the_next_run_trains_the_same(packed, train, ranks, step, kills):
    expected = undisturbed(packed, train, ranks, step)
    left = endure(packed, train, step, kills, ranks)
    ended = train(packed, f"--num_processes={ranks}").end()
    assert ended.code == 0, f"{left}\n{ended.explain()}"
    assert f"trained: {STEPS} of {STEPS} optimizer steps" in ended.err, ended.explain()
    assert packed.bits() == expected, left
