from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from simpletuner_gh200.caching import workers
from simpletuner_gh200.caching.workers import JobRefused, WorkerLost, WorkerPool

TARGET = "tests.unit.caching.work_samples:workshop"


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(TARGET, 2)
    yield made
    made.close()


def until(holds: Callable[[], bool]) -> bool:
    """Within a time that only a broken promise takes."""
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def test_a_worker_answers_jobs_with_and_without_content(pool: WorkerPool) -> None:
    worker = pool.worker()
    assert worker.ask(("echo", None), b"x" * 3_000_000, 60).message == ("echo", 3_000_000, "1")
    assert worker.ask(("echo", None), b"", 60).message == ("echo", 0, "1")


def test_an_array_comes_in_memory_that_outlives_the_worker(pool: WorkerPool) -> None:
    worker = pool.worker()
    pid, array = worker.ask(("numbers", 10), b"", 60)
    worker.end()
    assert until(lambda: is_gone(pid))
    assert np.array_equal(array, np.arange(10, dtype=np.float32).reshape(2, 5))


def test_pictures_that_wait_hold_no_descriptors(pool: WorkerPool) -> None:
    """A usual limit is 1024, and SimpleTuner has files to open."""
    worker = pool.worker()
    before = len(os.listdir("/proc/self/fd"))
    waiting = [worker.ask(("numbers", 10), b"", 60).array for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(np.array_equal(array.ravel(), np.arange(10)) for array in waiting)


def test_a_worker_that_raises_says_so_and_goes_on(pool: WorkerPool) -> None:
    worker = pool.worker()
    with pytest.raises(JobRefused, match="no shared memory"):
        worker.ask(("raise", "no shared memory"), b"", 60)
    assert worker.ask(("echo", None), b"", 60).message[0] == "echo"


def test_a_worker_that_the_system_refuses_is_not_asked_for_again_and_again(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers do that know no pidfds, and a limit of open files."""

    def refused(*_arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    with pytest.raises(WorkerLost, match="Operation not permitted"):
        pool.worker()


def test_a_server_that_may_not_fork_keeps_its_workers(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_END_SECONDS", 0.2)
    worker = pool.worker()
    server = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])
    resource.prlimit(server, resource.RLIMIT_NOFILE, (0, 0))  # what it is sent can't arrive: it can't fork either
    with pytest.raises(WorkerLost, match="refuses another process"):
        pool.worker()
    assert worker.ask(("echo", None), b"", 60).message[0] == "echo"
    assert worker.has_server()


@pytest.mark.parametrize(("word", "seconds", "why"), [("die", 60, "killed"), ("hang", 0.3, "no answer within 0.3 s")])
def test_a_worker_that_dies_or_hangs_is_gone_and_another_takes_its_place(
    pool: WorkerPool, word: str, seconds: float, why: str
) -> None:
    worker = pool.worker()
    with pytest.raises(WorkerLost, match=why):
        worker.ask((word, None), b"", seconds)
    assert until(lambda: is_gone(worker.pid))
    assert pool.worker().ask(("echo", None), b"", 60).message[0] == "echo"


def test_a_server_that_is_killed_is_started_again(pool: WorkerPool) -> None:
    worker = pool.worker()
    server = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    assert until(lambda: is_gone(worker.pid)), "a worker dies with its server"
    with pytest.raises(WorkerLost):
        worker.ask(("echo", None), b"", 60)
    assert pool.worker().ask(("echo", None), b"", 60).message[0] == "echo"


def test_a_server_that_cannot_start_ends_in_words() -> None:
    pool = WorkerPool("tests.unit.caching.not_there:workshop", 1)
    with pytest.raises(WorkerLost, match="has ended 3 times"):
        pool.worker()
    pool.close()


def test_closing_leaves_no_process(pool: WorkerPool) -> None:
    both = [pool.worker(), pool.worker()]
    pool.give_back(both[0])
    pool.close()
    assert all(until(lambda pid=worker.pid: is_gone(pid)) for worker in both)


def test_nothing_survives_a_rank_that_is_killed() -> None:
    code = f"""
import os, time
from simpletuner_gh200.caching.workers import WorkerPool
pool = WorkerPool({TARGET!r}, 2)
workers = [pool.worker(), pool.worker()]
print(*(worker.pid for worker in workers), pool._server.pid, flush=True)
workers[0].ask(("hang", None), b"", 600)
"""
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pids = list(map(int, rank.stdout.readline().split()))
    rank.kill()
    rank.wait()
    rank.stdout.close()
    assert len(pids) == 3
    assert all(until(lambda pid=pid: is_gone(pid)) for pid in pids)
