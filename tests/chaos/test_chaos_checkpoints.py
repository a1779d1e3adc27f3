"""kill -9 of rank, launcher and drainer around a checkpoint that is saved to memory: the disk has whole ones only, what
was handed over gets there whoever dies, nothing stays in memory, and the run that follows trains the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.held.saved import memory_folders
from simpletuner_gh200.upstream.checkpoints import checkpoints, flaw
from tests.chaos.laboratory import FEATURES, STEPS
from tests.chaos.test_chaos_kill import kill

BEHIND = {**FEATURES, "gh200_optimizations": {"checkpoints": "behind"}}
BEGUN, HANDED_OVER = "checkpoint-*", "order.json"
"""As soon as which of them is in the memory folder."""


def drainer_of(command):
    return next((number for number, words in command.processes().items() if "held.drain" in words), None)


def memory_of(rank):
    return [folder.path for folder in memory_folders() if folder.owner.startswith(f"{rank}-")]


def wait_in_memory(command, moment):
    """The rank, once its memory folder has that."""
    command.wait_until(command.rank, "there was a rank")
    rank = command.rank()
    command.wait_until(
        lambda: [found for folder in memory_of(rank) for found in folder.glob(moment)], f"memory had {moment}"
    )
    return rank


VICTIMS = {
    "a rank that is saving": (BEGUN, lambda command, rank: rank),
    "a rank that has saved": (HANDED_OVER, lambda command, rank: rank),
    "the launcher": (HANDED_OVER, lambda command, rank: command.process.pid),
}


@pytest.mark.chaos
@pytest.mark.one_release("4.")  # where a resumed run goes on in the order of the images that it was stopped in
def test_whoever_is_killed_the_checkpoint_is_whole_or_not_there_and_the_memory_is_free(packed, train):
    packed.configure(BEHIND, checkpoint_step_interval=2)
    saved, ranks = [], []
    for name, (moment, victim) in VICTIMS.items():
        command = train(packed)
        rank = wait_in_memory(command, moment)
        kill(victim(command, rank))
        assert command.end().code != 0, name
        assert command.nothing_left() == "", name
        assert memory_of(rank) == [] or name == "the launcher", f"{name}: the launcher clears it"
        ranks.append(rank)
        found = checkpoints(packed.project.output)
        assert not any(map(flaw, found)), name
        assert len(found) > len(saved) or moment == BEGUN, f"{name}: what was handed over gets to the disk"
        saved = found
        if not saved:
            packed.index_again()  # SimpleTuner shuffles it in every run; a resume has its own

    command = train(packed)
    rank = wait_in_memory(command, HANDED_OVER)
    drainer = drainer_of(command)
    if drainer is not None and Path(f"/proc/{drainer}").exists():
        kill(drainer)
    ended = command.end()
    assert ended.code == 0, ended.explain()
    assert f"trained: {STEPS} of {STEPS} optimizer steps" in ended.err, ended.explain()
    assert "the last one safe on disk is checkpoint-12" in ended.err, ended.explain()
    assert [flaw(path) for path in checkpoints(packed.project.output)] == [None, None]
    assert [memory_of(each) for each in (*ranks, rank)] == [[]] * 4, "what nobody could clear, the next start does"
    assert packed.bits() == packed.reference_bits(), ended.explain()
