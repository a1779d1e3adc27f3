"""Ranks share: what one publishes or withdraws, the others see; what one writes into a hit, they don't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import take_in
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.table import MISSING, Table

LARGE = 70_000

OTHER = """
    import json, sys, os, torch
    from simpletuner_gh200.cache.control import Control
    from simpletuner_gh200.cache.fill import take_in
    from simpletuner_gh200.cache.table import MISSING, Table

    pid, fd = map(int, sys.argv[1:3])
    block = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    table = Table("other", Control.attach(block, label="other"))
    kept = []
    for line in sys.stdin:
        action, path = json.loads(line)
        answer = None
        if action == "get":
            value = table.get(path)
            answer = None if value is MISSING else float(value[0])
        elif action == "scribble":
            value = table.get(path)
            value.fill_(-1)
            kept.append(value)
        elif action == "take":
            answer = take_in(table, path)
        elif action == "drop":
            table.drop()
        elif action == "invalidate":
            answer = table.invalidate(path)
        elif action == "batch":
            found = table.find_all(path)
            answer = None if found is None else len(found)
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def leader():
    made = Table("leader", Control.create(64, label="leader", shared=True))
    yield made
    made.close()


@pytest.fixture
def other(leader):
    arguments = [str(os.getpid()), str(leader.control.slab.fd)]
    rank = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OTHER), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(action, path=None):
        rank.stdin.write(json.dumps([action, path]) + "\n")
        rank.stdin.flush()
        return json.loads(rank.stdout.readline())

    ask.end = lambda: rank.communicate(timeout=30)
    yield ask
    if rank.returncode is None:
        rank.communicate(timeout=30)


def test_two_ranks(leader, other, saved, tmp_path):
    """One test: a second interpreter with torch costs seconds."""
    paths = [saved(torch.full((LARGE,), float(n)), f"{n}.pt") for n in range(4)]
    # Each publishes its part; both see everything.
    assert take_in(leader, paths[0])
    assert take_in(leader, paths[1])
    assert other("take", paths[2])
    assert other("take", paths[3])
    assert [float(leader.get(path)[0]) for path in paths] == [0, 1, 2, 3]
    assert [other("get", path) for path in paths] == [0, 1, 2, 3]
    assert other("batch", paths) == 4
    # Writing into a hit stays with the writer.
    other("scribble", paths[0])
    other("scribble", paths[3])
    assert float(leader.get(paths[0])[0]) == 0
    assert float(leader.get(paths[3])[0]) == 3
    assert other("get", paths[0]) == 0
    # Withdrawn by one, gone for the other, at once, batches included.
    assert leader.find_all(paths) is not None
    assert other("invalidate", paths[1])
    assert leader.get(paths[1]) is MISSING
    assert leader.find_all(paths) is None
    assert leader.invalidate(paths[2])
    assert other("get", paths[2]) is None
    # A rewritten file is noticed by both, whoever published it.
    saved(torch.full((LARGE,), 8.0), "3.pt")
    assert leader.get(paths[3]) is MISSING
    assert other("get", paths[3]) is None
    assert take_in(leader, paths[3])
    assert other("get", paths[3]) == 8
    # Dropping drops for all; both can fill again.
    kept = leader.get(paths[3])
    other("drop")
    assert leader.get(paths[0]) is MISSING
    assert float(kept[-1]) == 8, "what was handed out stays"
    assert take_in(leader, paths[0])
    assert other("get", paths[0]) == 0
    assert other("take", paths[1])
    assert float(leader.get(paths[1])[0]) == 1
    # What one lists in a pack, the other reads there; and neither reads what is not there any more.
    packs = PackFolder(tmp_path / "packs")
    packs.make(str(tmp_path))
    assert packs.save(leader, paths) and not leader.drop()
    assert packs.load(leader, workers=1).entries == 2
    assert [other("get", path) for path in paths[:2]] == [0, 1] == [float(leader.get(path)[0]) for path in paths[:2]]
    assert leader.control.held == 0
    os.truncate(packs.packs()[0], 5000)
    assert other("get", paths[0]) is None and leader.get(paths[1]) is MISSING
    assert take_in(leader, paths[0]) and other("take", paths[1])
    assert [other("get", path) for path in paths[:2]] == [0, 1]
    # Memory that one gives back is not filled again by another.
    leader.give_back()
    assert other("get", paths[1]) is None
    assert not other("take", paths[1])
    assert not take_in(leader, paths[0])


def test_what_a_rank_filled_stays_where_it_was_held_before_the_end(leader, other, saved):
    path = saved(torch.full((LARGE,), 5.0), "held.pt")
    assert other("take", path)
    leader.hold_all()
    other.end()
    assert float(leader.get(path)[0]) == 5


def test_what_a_rank_took_with_it_is_not_packed_and_only_readers_count_it(leader, other, saved):
    path = saved(torch.full((LARGE,), 5.0), "gone.pt")
    assert other("take", path)
    other.end()
    assert leader.find(path, fetch=False) is None
    assert leader.statistics.fallbacks == {}
    assert leader.get(path) is MISSING
    assert leader.statistics.fallbacks == {"segment of another rank is gone": 1}
