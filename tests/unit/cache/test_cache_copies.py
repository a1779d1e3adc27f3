"""A copy beside each GPU where there is room, else one for all; either way what is withdrawn is gone everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.sizing import decide
from simpletuner_gh200.memory.numa import Node
from simpletuner_gh200.units import GIB

QUAD = [Node(index, True, 100 * GIB) for index in range(4)] + [Node(4, False, 96 * GIB)]


def test_four_gpus_with_a_memory_of_their_own_have_a_copy_each() -> None:
    copies = decide([0, 1, 2, 3], 10 * GIB, 400 * GIB, QUAD)
    assert copies.groups == ((0,), (1,), (2,), (3,))
    assert "beside each of memory nodes 0, 1, 2, 3" in copies.reason


def test_ranks_beside_the_same_node_share() -> None:
    copies = decide([0, 1, 0, 1], 10 * GIB, 400 * GIB, QUAD)
    assert copies.groups == ((0, 2), (1, 3))
    assert [copies.of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [copies.position(rank) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("near", "needed", "allowed", "reason"),
    [
        ([0, 0], 1, 400, "beside the same memory node"),
        ([0, None], 1, 400, "not every rank has a memory node"),
        ([None, None], 1, 400, "not every rank has a memory node"),
        ([0, 1], None, 400, "not known yet"),
        ([0, 1], 60, 100, "budget has no room for 2"),
        ([0, 1], 90, 400, "memory node 0 has no room"),
        ([0, 4], 10, 400, "memory node 4 has no room"),
        ([0, 9], 10, 400, "memory node 9 has no room"),
    ],
)
def test_otherwise_there_is_one(near: list[int | None], needed: int | None, allowed: int, reason: str) -> None:
    copies = decide(near, None if needed is None else needed * GIB, allowed * GIB, QUAD)
    assert copies.groups == ((0, 1),)
    assert reason in copies.reason


@given(
    st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=8),
    st.integers(0, 200),
    st.integers(0, 800),
)
def test_every_rank_is_in_one_copy_and_all_copies_fit(near: list[int | None], needed: int, allowed: int) -> None:
    copies = decide(near, needed * GIB, allowed * GIB, QUAD)
    assert sorted(rank for ranks in copies.groups for rank in ranks) == list(range(len(near)))
    if len(copies.groups) > 1:
        assert needed * len(copies.groups) <= allowed
        for ranks in copies.groups:
            assert len({near[rank] for rank in ranks}) == 1


RANK = """
    import json, os, sys
    from simpletuner_gh200.cache.fill import take_in
    from simpletuner_gh200.cache.service import Caches, Wanted
    from simpletuner_gh200.cache.table import MISSING
    from simpletuner_gh200.memory.numa import Node
    from simpletuner_gh200.memory.sharing import NodeGroup

    folder, nodes = sys.argv[1], [int(word) for word in sys.argv[2:]]
    group = NodeGroup.from_environment("copies")
    caches = Caches(
        [Wanted("latents", "vae", folder)],
        allowed=1 << 30,
        group=group,
        near=nodes[group.local_rank],
        memory_nodes=lambda: [Node(index, True, 1 << 40) for index in set(nodes)],
    )
    caches.fill()
    caches.group.meet("filled")
    table = caches.tables["latents"]
    for line in sys.stdin:
        action, path = json.loads(line)
        if action == "get":
            value = table.get(path)
            answer = None if value is MISSING else float(value[0])
        elif action == "take":
            answer = take_in(table, path)
        elif action == "invalidate":
            answer = table.invalidate(path)
        elif action == "drop":
            answer = table.drop()
        else:
            owners = sorted({row.pid == os.getpid() for row in table.control.rows()})
            answer = {**table.report(), "own_segments_only": owners == [True], "copies": len(caches.copies.groups)}
        print(json.dumps(answer), flush=True)
    caches.close()
"""


@pytest.fixture
def two_ranks(tmp_path: Path):
    started = []

    def start(folder: str, *nodes: int):
        base = {**os.environ, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(os.getpid()), "TMPDIR": str(tmp_path)}
        base["XDG_RUNTIME_DIR"] = ""
        for rank in range(2):
            command = [sys.executable, "-c", textwrap.dedent(RANK), folder, *map(str, nodes)]
            environment = {**base, "LOCAL_RANK": str(rank)}
            started.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )

    def ask(rank: int, action: str, path: str | None = None):
        process = started[rank]
        process.stdin.write(json.dumps([action, path]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield start, ask
    try:
        codes = [process.communicate(timeout=60) and process.returncode for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0]


def test_two_copies_hold_the_same_and_lose_the_same(two_ranks, tmp_path: Path) -> None:
    start, ask = two_ranks
    folder = tmp_path / "latents"
    folder.mkdir()
    paths = [str(folder / f"{number}.pt") for number in range(4)]
    for number, path in enumerate(paths):
        torch.save(torch.full((70_000,), float(number)), path)
    start(str(folder), 0, 1)
    for rank in (0, 1):
        assert [ask(rank, "get", path) for path in paths] == [0, 1, 2, 3]
        report = ask(rank, "report")
        assert (report["entries"], report["copies"]) == (4, 2)
        assert report["own_segments_only"], "nothing is read from the other node's memory"
    # Withdrawn by one, gone from both, whichever has it.
    assert ask(1, "invalidate", paths[0])
    assert ask(0, "get", paths[0]) is None and ask(1, "get", paths[0]) is None
    assert ask(0, "take", paths[0])
    assert ask(1, "get", paths[0]) is None, "each copy takes in for itself"
    assert ask(1, "invalidate", paths[0]), "it was in the other copy"
    assert ask(0, "get", paths[0]) is None
    # A rewritten file is noticed by both.
    torch.save(torch.full((70_000,), 8.0), paths[1])
    assert ask(0, "get", paths[1]) is None and ask(1, "get", paths[1]) is None
    assert ask(1, "take", paths[1]) and ask(1, "get", paths[1]) == 8
    # Dropping drops everything everywhere.
    ask(0, "drop")
    assert ask(1, "get", paths[3]) is None
    assert ask(1, "take", paths[3]) and ask(1, "get", paths[3]) == 3


def test_threads_of_two_ranks_that_wait_for_each_other_s_copies_are_no_deadlock() -> None:
    """Each process holds one lock in one thread and waits for the other's in another: the kernel calls that one."""
    mine, theirs = (Control.create(8, label=name, shared=True) for name in ("mine", "theirs"))
    taken, told = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # Another rank attaches for itself: what was forked with a process writes nothing.
            second, first = (Control.attach(control.fd, label="rank 1") for control in (theirs, mine))
            code = 0 if hold_and_wait(second, first, lambda: os.write(told, b"x")) else 2
        finally:
            os._exit(code)
    os.close(told)
    assert os.read(taken, 1) == b"x"
    assert hold_and_wait(mine, theirs, lambda: None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mine.close()
    theirs.close()


def hold_and_wait(held: Control, wanted: Control, say: Callable[[], object]) -> bool:
    """Did the thread get what it wanted, after what is held was let go?"""
    got = threading.Event()

    def want() -> None:
        with wanted.writing():
            got.set()

    waiting = threading.Thread(target=want)
    with held.writing():
        say()
        time.sleep(0.3)  # the other process has its own by now
        waiting.start()
        time.sleep(0.5)
    waiting.join(30)
    return got.is_set()
