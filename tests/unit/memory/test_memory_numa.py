"""Memory policy: which nodes, whose wish counts, and what happens where a container forbids the calls."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner_gh200.memory import allocate, numa

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2


def nodes(root: Path, **cpus: str) -> Path:
    for name, listed in cpus.items():
        (root / name).mkdir(parents=True)
        (root / name / "cpulist").write_text(listed + "\n")
        (root / name / "meminfo").write_text("Node 0 MemFree: 1000 kB\n")
    return root


def in_child(act: Callable[[], object]) -> str:
    """What ``act`` returns in a forked child, whose policies and filters end with it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def forbid(*calls: numa.Call) -> None:
    """As Docker's default filter does without CAP_SYS_NICE: these calls end with EPERM, all others go through."""
    numbers = [numa.NUMBERS[call][platform.machine()] for call in calls]
    load, equal, done = 0x20, 0x15, 0x06
    lines = [(load, 0, 0, 0)]
    lines += [(equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    lines += [(done, 0, 0, 0x7FFF0000), (done, 0, 0, 0x00050000 | 1)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, FILTER, described, 0, 0) == 0, os.strerror(ctypes.get_errno())


def policy() -> int:
    found = ctypes.c_int(-1)
    zero = ctypes.c_ulong(0)
    assert numa._call("get_mempolicy", ctypes.byref(found), None, zero, None, zero) is None
    return found.value


needs_policies = pytest.mark.skipif(bool(numa.refused_calls()), reason="this container forbids memory policies")


@needs_policies
def test_a_process_stays_on_the_nodes_with_cpus(tmp_path: Path) -> None:
    root = nodes(tmp_path, node0="0-71", node1="", node2="")

    def act() -> object:
        return numa.stay_on_cpu_nodes(root), policy(), numa.stay_on_cpu_nodes(root)

    before = policy()
    assert in_child(act) == (
        "('memory of this process stays on CPU node 0', 2, 'a memory policy is set already (numactl?) and stays')"
    )
    assert policy() == before, "of the child alone"


def test_without_a_node_to_keep_off_nothing_is_set(tmp_path: Path) -> None:
    assert numa.stay_on_cpu_nodes(nodes(tmp_path / "plain", node0="0-3", node1="4-7")) is None
    assert numa.stay_on_cpu_nodes(nodes(tmp_path / "odd", node0="", node1="")) is None
    assert numa.stay_on_cpu_nodes(tmp_path / "none") is None


def test_a_container_that_forbids_it_is_told_about_once(tmp_path: Path) -> None:
    root = nodes(tmp_path, node0="0-71", node1="")

    def act() -> object:
        said: list[str] = []
        numa.logger.warning = lambda text, *words: said.append(text % words)  # type: ignore[method-assign]
        numa.read_nodes = lambda *_: (numa.Node(0, True, 1 << 40), numa.Node(1, False, 1 << 40))
        forbid("mbind", "move_pages", "set_mempolicy", "get_mempolicy")
        page = allocate.Region(0x10000, 4096, lambda: None)
        bound = [numa.bind(page.address, page.size) for _ in range(3)]
        whole = numa.stay_on_cpu_nodes(root)
        return bound, whole, sorted(numa.refused_calls()), said

    answer = in_child(act)
    assert "['get_mempolicy', 'mbind', 'move_pages']" in answer
    assert answer.count("mbind refused: Operation not permitted; in a container: docker run --cap-add SYS_NICE") == 1
    assert answer.count("mbind refused: Operation not permitted'") == 3, "every caller has the reason"
    assert answer.count("set_mempolicy refused: Operation not permitted") == 2, "in the outcome, and said once"


@needs_policies
def test_where_nothing_forbids_it_nothing_is_refused() -> None:
    before = policy()
    assert numa.refused_calls() == {}
    assert policy() == before
