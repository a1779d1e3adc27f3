"""Two ranks of a node: each fills its part, both find everything; what one writes into a hit stays with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

COUNT = 40
LARGE = 20_000

RANK = """
    import json, sys, torch
    from simpletuner_gh200.held.cache import MISSING
    from simpletuner_gh200.held.caches import Caches, Wanted
    from simpletuner_gh200.memory.sharing import NodeGroup
    from pathlib import Path

    folder, root, when = sys.argv[1:]
    caches = Caches([Wanted("x", "vae", folder)], allowed=None, group=NodeGroup.from_environment("test"),
                    packs=Path(root))
    caches.fill(when)
    caches.wait_until_filled(30)
    cache = caches.caches["x"]
    for line in sys.stdin:
        action, path = json.loads(line)
        answer = None
        if action == "get":
            value = cache.get(path)
            answer = None if value is MISSING else float(value[0])
            if answer is not None:
                value.fill_(-1)
        elif action == "published":
            answer = cache.statistics.published
        elif action == "found":
            answer = cache.find_all(path) is not None
        elif action == "held":
            answer = cache.held_bytes
        elif action == "wish":
            cache.wish(path)
            answer = caches.wait_until_filled(30)
        else:
            answer = getattr(caches, action)()
        print(json.dumps(answer), flush=True)
    caches.close()
"""


@pytest.fixture
def start(tmp_path):
    """Starts both ranks; a function each, which asks it."""
    begun: list[subprocess.Popen[str]] = []

    def begin(when):
        def ask_of(rank):
            def ask(action, path=None):
                rank.stdin.write(json.dumps([action, path]) + "\n")
                rank.stdin.flush()
                return json.loads(rank.stdout.readline())

            ask.end = lambda: rank.communicate(timeout=60)
            return ask

        ranks = []
        for number in range(2):
            place = {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(os.getpid())}
            arguments = [str(tmp_path / "cache"), str(tmp_path / "packs"), when]
            rank = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(RANK), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **place},
            )
            ranks.append(rank)
        begun.extend(ranks)
        return [ask_of(rank) for rank in ranks]

    yield begin
    for rank in begun:
        if rank.returncode is None:
            rank.communicate(timeout=60)


@pytest.mark.one_release("4.")
def test_two_ranks(start, saved, tmp_path):
    """One test: interpreters with torch cost seconds."""
    paths = [saved(torch.full((LARGE,), float(n)), f"cache/{n}.pt") for n in range(COUNT)]
    one, other = start("start")
    parts = [one("published"), other("published")]
    assert sum(parts) == COUNT and all(parts), "each its part"
    for rank in (one, other):
        assert rank("found", paths), "whole when it starts"
    for _ in range(2):  # whoever asks writes into what it gets
        assert [rank("get", path) for path in paths[:6] for rank in (one, other)] == [
            float(n) for n in range(6) for _ in "12"
        ]
    # A rewritten file is noticed by both, and what one takes in anew, both find.
    saved(torch.full((LARGE,), 88.0), "cache/3.pt")
    assert [one("get", paths[3]), other("get", paths[3])] == [None, None]
    assert other("wish", paths[3])
    assert [one("get", paths[3]), other("get", paths[3])] == [88.0, 88.0]
    # The other ends, and what it filled stays: the leader has it mapped, and packs it.
    one("save"), other("save")
    other.end()
    assert one("found", paths)
    one.end()
    # The next start reads packs, each rank its own descriptor.
    one, other = start("background")
    assert one("found", paths) and other("found", paths)
    assert [one("held"), other("held")] == [0, 0]
    saved(torch.full((LARGE,), 77.0), "cache/4.pt")
    assert one("get", paths[4]) is None and one("wish", paths[4])
    assert other("get", paths[4]) == 77.0 and other("held") > 0
