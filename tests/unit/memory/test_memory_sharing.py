"""Ranks of one node meet, share descriptors, notice a dead leader, and leave nothing behind."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner_gh200.errors import SharingError
from simpletuner_gh200.memory import meeting_place
from simpletuner_gh200.memory.mapping import (
    CONTENT_SEALS,
    create_memfd,
    map_shared,
    seal,
)
from simpletuner_gh200.memory.sharing import NodeGroup, NodePosition

FORK = multiprocessing.get_context("fork")


def group(rank: int, size: int, folder: Path) -> NodeGroup:
    environment = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": "29511"}
    return NodeGroup(NodePosition.from_environment("test", environment), folder=folder)


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
    assert list(tmp_path.iterdir()) == [], "the meeting place is gone as soon as everybody is there"
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


def test_one_rank_needs_no_meeting(tmp_path: Path) -> None:
    alone = NodeGroup(NodePosition.from_environment("test", {}), folder=tmp_path)
    alone.join(0)
    alone.share("anything")
    assert alone.is_leader
    assert list(tmp_path.iterdir()) == []


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


def test_what_a_leader_killed_while_meeting_left_is_swept_at_the_next_start(tmp_path: Path) -> None:
    leader = start(wait_for_ever, tmp_path)
    while not list(tmp_path.glob("*/meet")):
        time.sleep(0.01)
    (place,) = tmp_path.iterdir()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert meeting_place.sweep(tmp_path) == 0, "the place of a living run is left alone"
    assert leader.pid is not None
    os.kill(leader.pid, signal.SIGKILL)
    leader.join(5)
    assert meeting_place.sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(SharingError, match=r"local ranks \[1, 2\] of 3 did not come"):
        group(0, 3, tmp_path).join(0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_leader_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SharingError, match="did not find local rank 0"):
        group(1, 2, tmp_path).join(0.1)


def test_a_place_open_to_others_is_passed_by_and_said(tmp_path: Path) -> None:
    mine = group(1, 2, tmp_path)
    (tmp_path / f"{meeting_place.meeting(mine.position.identity, tmp_path).beginning}abcdefgh").mkdir(mode=0o755)
    with pytest.raises(SharingError, match="mode 755"):
        mine.join(0.1)


def test_nobody_is_called_in_a_place_that_others_can_write_to(tmp_path: Path) -> None:
    """A socket there may be anybody's, whoever owns the folder."""
    where = meeting_place.meeting("0" * 24, tmp_path)
    place = tmp_path / f"{where.beginning}abcdefgh"
    place.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        folder = os.open(place, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{folder}/{meeting_place.SOCKET}")
        os.close(folder)
        listener.listen()
        place.chmod(0o777)
        assert meeting_place.call(where) is None
        place.chmod(0o700)
        connection = meeting_place.call(where)
        assert connection is not None
        connection.close()


def test_whoever_knows_port_and_run_can_not_take_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Folders, files and links under every name that can be known beforehand, of another user; the ranks meet."""
    beginning = meeting_place.meeting(group(0, 2, tmp_path).position.identity, tmp_path).beginning
    planted = [tmp_path / (beginning + end) for end in ("", "aaaaaaaa", "zzzzzzzz")]
    planted[0].mkdir(mode=0o777)
    planted[1].touch()
    planted[2].symlink_to(tmp_path)
    foreign = {path.stat(follow_symlinks=False).st_ino for path in planted}
    real = meeting_place._not_ours
    monkeypatch.setattr(
        meeting_place, "_not_ours", lambda found: "belongs to mallory" if found.st_ino in foreign else real(found)
    )
    other = start(join_and_end, 1, tmp_path)
    leader = group(0, 2, tmp_path)
    leader.join(10)
    assert ended_well(other)
    leader.close()
    assert sorted(tmp_path.iterdir()) == planted, "what is not ours stays"
    assert caplog.text.count("belongs to mallory; the ranks meet elsewhere") == 3


def join_and_end(rank: int, folder: Path) -> None:
    group(rank, 2, folder).join(10)


def test_a_folder_of_the_users_own_is_never_swept(tmp_path: Path) -> None:
    """It has the name of a meeting place, and something in it; or it merely begins like one."""
    named = tmp_path / f"{meeting_place.PREFIX}-{os.getuid()}-{'0' * 24}-abcdefgh"
    similar = tmp_path / f"{meeting_place.PREFIX}-{os.getuid()}-notes"
    for folder in (named, similar):
        folder.mkdir(mode=0o700)
        (folder / "thesis.txt").write_text("years of work")
    assert meeting_place.sweep(tmp_path) == 0
    (named / "thesis.txt").rename(named / meeting_place.SOCKET)
    assert meeting_place.sweep(tmp_path) == 0
    assert (named / meeting_place.SOCKET).read_text() == (similar / "thesis.txt").read_text() == "years of work"


def test_a_place_that_another_start_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like that of a dead run until its maker has the lock."""
    make, swept = meeting_place.tempfile.mkdtemp, []

    def made_and_swept(**options: object) -> str:
        place = make(**options)
        if not swept:
            swept.append(meeting_place.sweep(tmp_path))
        return place

    monkeypatch.setattr(meeting_place.tempfile, "mkdtemp", made_and_swept)
    host = meeting_place.Host(meeting_place.meeting("0" * 24, tmp_path))
    assert swept == [1]
    (place,) = tmp_path.iterdir()
    assert (place / meeting_place.SOCKET).is_socket()
    host.close()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_goes_while_it_is_looked_at_is_nobodys_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run ends its meeting between our listing of its folder and our look at the socket in it."""
    host, look = meeting_place.Host(meeting_place.meeting("0" * 24, tmp_path)), os.listdir

    def list_and_lose(folder: int) -> list[str]:
        found = look(folder)
        host.close()
        return found

    monkeypatch.setattr(meeting_place.os, "listdir", list_and_lose)
    assert meeting_place.sweep(tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


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
    monkeypatch.setattr("simpletuner_gh200.memory.sharing._peer_user", lambda _connection: os.getuid() + 1)
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
    first = NodePosition.from_environment("store", environment)
    assert first.local_rank == 1
    assert NodePosition.from_environment("store", environment) == first
    assert NodePosition.from_environment("cache", environment) != first
    assert NodePosition.from_environment("store", environment | {"TORCHELASTIC_RESTART_COUNT": "1"}) != first
    assert NodePosition.from_environment("store", environment | {"GROUP_RANK": "1"}) != first, "TMPDIR may be shared"


def test_sealed_memory_refuses_writes() -> None:
    fd = create_memfd("sealed")
    os.write(fd, b"abc")
    seal(fd)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & CONTENT_SEALS == CONTENT_SEALS
    with pytest.raises(PermissionError):
        os.write(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x")
    os.close(fd)
