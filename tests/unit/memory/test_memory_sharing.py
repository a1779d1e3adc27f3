"""Ranks of one node meet, share descriptors, notice a dead leader, and leave nothing behind."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner_gh200.errors import SharingError
from simpletuner_gh200.memory import sharing
from simpletuner_gh200.memory.mapping import CONTENT_SEALS, create_memfd, map_shared, seal
from simpletuner_gh200.memory.sharing import NodeGroup

FORK = multiprocessing.get_context("fork")


def group(rank: int, size: int, folder: Path) -> NodeGroup:
    """``folder``: one test's own, so that others that run at the same time meet elsewhere."""
    environment = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": "29511"}
    return NodeGroup.from_environment(str(folder), environment)


def start(work: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    process = FORK.Process(target=work, args=arguments)
    process.start()
    return process


def ended_well(*processes: multiprocessing.Process) -> bool:
    for process in processes:
        process.join(20)
    return all(process.exitcode == 0 for process in processes)


def read_shared(rank: int, folder: Path) -> None:
    mine = group(rank, 3, folder)
    mine.join(10)
    _note, (second,) = mine.receive("second")
    note, (fd, table_fd) = mine.receive("first")
    assert note == {"entries": 7}
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & CONTENT_SEALS == CONTENT_SEALS
    table = map_shared(table_fd)
    assert table is not None
    assert os.pread(fd, 10, 0) == b"dataset"
    assert os.pread(second, 10, 0) == b"other"
    table[rank] = rank


def test_descriptors_reach_every_rank_by_name_in_any_order(tmp_path: Path) -> None:
    ranks = [start(read_shared, rank, tmp_path) for rank in (1, 2)]
    leader = group(0, 3, tmp_path)
    leader.join(10)
    assert sharing._call(leader._address) is None, "the meeting place is gone as soon as everybody is there"
    data, other, table = create_memfd("data"), create_memfd("other"), create_memfd("table", 4096)
    os.write(data, b"dataset")
    os.write(other, b"other")
    seal(data)
    leader.beat()
    leader.share("first", data, table, note={"entries": 7})
    leader.share("second", other)
    assert ended_well(*ranks)
    seen = map_shared(table)
    assert seen is not None
    assert bytes(seen[:3]) == b"\x00\x01\x02", "what a rank writes into a shared table is seen by the others"
    leader.close()


def tell_own_rank(rank: int, folder: Path) -> None:
    mine = group(rank, 3, folder)
    mine.join(10)
    fd = create_memfd("told")
    os.write(fd, b"from %d" % rank)
    mine.tell("files", fd, note={"rank": rank})
    mine.receive("thanks")


def test_the_leader_hears_every_rank(tmp_path: Path) -> None:
    ranks = [start(tell_own_rank, rank, tmp_path) for rank in (1, 2)]
    leader = group(0, 3, tmp_path)
    leader.join(10)
    heard = leader.hear("files")
    assert [note for note, _fds in heard] == [{"rank": 1}, {"rank": 2}]
    assert [os.pread(fds[0], 10, 0) for _note, fds in heard] == [b"from 1", b"from 2"]
    leader.share("thanks")
    assert ended_well(*ranks)
    leader.close()


def test_one_rank_needs_no_meeting() -> None:
    alone = NodeGroup.from_environment("test", {})
    alone.join(0)
    alone.share("anything")
    assert alone.is_leader


def expect_error(rank: int, folder: Path, words: str) -> None:
    mine = group(rank, 2, folder)
    mine.join(10)
    with pytest.raises(SharingError, match=words):
        mine.receive("dataset")


def test_a_failure_of_the_leader_reaches_the_others(tmp_path: Path) -> None:
    rank = start(expect_error, 1, tmp_path, "over the ceiling")
    leader = group(0, 2, tmp_path)
    leader.join(10)
    leader.fail("dataset", "over the ceiling")
    assert ended_well(rank)
    leader.close()


def die_after_joining(folder: Path, until: int, end: int) -> None:
    leader = group(0, 2, folder)
    leader.join(10)
    if os.fork() == 0:  # a forked worker that outlives the leader must not keep the connection alive
        os.close(end)
        os.read(until, 1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_leader_is_noticed_at_once_even_if_its_workers_live(tmp_path: Path) -> None:
    until, end = os.pipe()
    leader = start(die_after_joining, tmp_path, until, end)
    rank = start(expect_error, 1, tmp_path, "ended before it shared 'dataset'")
    assert ended_well(rank)
    os.close(end)
    leader.join(5)


def wait_for_ever(folder: Path) -> None:
    group(0, 2, folder).join(60)


def test_a_leader_killed_while_meeting_leaves_the_name_to_the_next_start(tmp_path: Path) -> None:
    leader, next_start = start(wait_for_ever, tmp_path), group(0, 2, tmp_path)
    while (reached := sharing._call(next_start._address)) is None:
        time.sleep(0.01)
    reached.close()
    with pytest.raises(SharingError, match="taken by another run"):
        next_start.join(10)
    assert leader.pid is not None
    os.kill(leader.pid, signal.SIGKILL)
    leader.join(5)
    rank = start(join_and_end, 1, tmp_path)
    next_start.join(10)
    assert ended_well(rank)
    next_start.close()


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(SharingError, match=r"local ranks \[1, 2\] of 3 did not come"):
        group(0, 3, tmp_path).join(0.1)


def test_a_missing_leader_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SharingError, match="did not find local rank 0"):
        group(1, 2, tmp_path).join(0.1)


def join_and_end(rank: int, folder: Path) -> None:
    group(rank, 2, folder).join(10)


def beats_then_tells(folder: Path) -> None:
    mine = group(1, 2, folder)
    mine.join(10)
    for _ in range(8):
        time.sleep(0.05)
        mine.beat()
    mine.tell("listed", note={"files": 3})


def test_a_rank_at_long_work_is_waited_for_as_long_as_it_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpletuner_gh200.memory.sharing.BEAT_SECONDS", 0.02)
    other = start(beats_then_tells, tmp_path)
    leader = group(0, 2, tmp_path)
    leader.join(10)
    monkeypatch.setattr("simpletuner_gh200.memory.sharing.PATIENCE_SECONDS", 0.2)
    assert leader.hear("listed") == [({"files": 3}, [])]
    assert ended_well(other)


def test_another_user_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_peer_user", lambda _connection: os.getuid() + 1)
    leader = group(0, 2, tmp_path)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.send(b"1")
    came: dict[int, socket.socket] = {}
    leader._admit(ours, came)
    assert came == {}
    with pytest.raises(ConnectionResetError):
        theirs.recv(10)


def test_purposes_restarts_and_nodes_do_not_meet() -> None:
    environment = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}

    def identity(purpose: str = "store", **changed: str) -> str:
        return NodeGroup.from_environment(purpose, environment | changed).identity

    assert identity() == identity()
    others = {identity("cache"), identity(TORCHELASTIC_RESTART_COUNT="1"), identity(GROUP_RANK="1"), identity()}
    assert len(others) == 4


def test_sealed_memory_refuses_writes() -> None:
    fd = create_memfd("sealed")
    os.write(fd, b"abc")
    seal(fd)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & CONTENT_SEALS == CONTENT_SEALS
    with pytest.raises(PermissionError):
        os.write(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x")
    os.close(fd)
