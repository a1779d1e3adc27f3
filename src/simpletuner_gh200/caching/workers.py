"""Worker processes, seen from the rank: started by a server of their own, asked one job at a time, replaced if lost."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from simpletuner_gh200.caching.server import ENVIRONMENT, REFUSED, receive_with_fd, send
from simpletuner_gh200.config.environment import SWITCH, for_child
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.host import cpu_seconds
from simpletuner_gh200.memory.mapping import map_file

logger = logging.getLogger("simpletuner_gh200")

START_SECONDS = 300.0
"""Until the server has imported what its workers need, on a busy machine."""

IDLE_SHARE = 0.01
"""Of the time that a worker was given: one that used less of a core has waited."""

_END_SECONDS = 10.0
"""Until a server that has let go of its socket is gone: else it lives, and could not fork."""

_STARTS = 3
"""Servers that are started at most: one that dies again and again won't come back."""


class WorkerLost(GH200Error):
    """The process that was at a job is gone, or was ended because the job took too long."""


class WorkerWaited(WorkerLost):
    """It took too long, and did nothing in that time: storage does not answer."""


class JobRefused(GH200Error):
    """The worker raised something that is no answer, and is still there."""


class Answer(NamedTuple):
    message: Any
    array: np.ndarray[Any, Any] | None
    """In memory shared with the worker, which has let go of it: freed with the last view."""


class Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, jobs: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self._jobs = jobs
        self._server = server
        self._jobs.settimeout(START_SECONDS)
        pid = self._receive().message
        self.pid = int(pid)
        try:
            self._process = os.pidfd_open(self.pid)
        except ProcessLookupError as gone:
            raise WorkerLost("it ended as soon as it was started") from gone

    def ask(self, job: Any, content: Any, seconds: float) -> Answer:
        """WorkerLost where it is gone, or has not answered by then; then it is killed. JobRefused where it failed."""
        self._jobs.settimeout(seconds)
        before = self._cpu_seconds()
        try:
            send(self._jobs, job, content)
            return self._receive()
        except WorkerLost:
            self.end()
            raise
        except OSError as gone:
            waited = self._cpu_seconds() - before < IDLE_SHARE * seconds
            self.end()
            if not isinstance(gone, TimeoutError):
                raise WorkerLost("its process was killed") from gone
            raise (WorkerWaited if waited else WorkerLost)(f"no answer within {seconds:g} s") from gone

    def _cpu_seconds(self) -> float:
        with suppress(OSError):
            return cpu_seconds(self.pid)
        return 0.0  # it is gone

    def _receive(self) -> Answer:
        try:
            (message, kind), _content, fds = receive_with_fd(self._jobs)
        except ConnectionError as gone:
            raise WorkerLost("its process was killed") from gone
        if kind == REFUSED:
            raise JobRefused(f"a worker failed: {message}")
        if kind is None:
            return Answer(message, None)
        if not fds:
            raise JobRefused("no descriptor is left for a worker's answer", remedy="raise ulimit -n")
        dtype, shape = kind
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        try:
            # No mmap object: those keep a descriptor each, and many pictures wait at once.
            content = map_file(fds[0], max(size, 1)).array()
        finally:
            os.close(fds[0])
        return Answer(message, content[:size].view(dtype).reshape(shape))

    def has_server(self) -> bool:
        """Else it was ended with all the others, whatever it was at."""
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(timeout=0.2)  # the kernel ends the workers a moment before
        return self._server.poll() is None

    def end(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        os.close(self._process)
        self._jobs.close()


class WorkerPool:
    """``target``, "module:function", is what they run; nothing is started before ``start`` or the first ``worker``."""

    def __init__(self, target: str, count: int) -> None:
        self.count = count
        self._target = target
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._idle: list[Worker] = []

    def start(self) -> None:
        """Have the server begin to import. Does not wait for it."""
        with self._lock:
            if self._server is None or self._server.poll() is not None:
                self._start()

    def _start(self) -> None:
        if self._starts >= _STARTS:
            raise WorkerLost(f"the server of the workers has ended {self._starts} times")
        self._starts += 1
        self._let_go()  # with it went its workers
        self._control, theirs = socket.socketpair()
        # Without CUDA, and without us: a worker is not one more rank.
        alone = {**ENVIRONMENT, SWITCH: "0", "CUDA_VISIBLE_DEVICES": "", "SIMPLETUNER_LOG_LEVEL": "CRITICAL"}
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "simpletuner_gh200.caching.server", str(theirs.fileno()), self._target],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=for_child({**alone, "SIMPLETUNER_SKIP_TORCH": "1"}),
            )

    def worker(self) -> Worker:
        """An idle one, or a new one. WorkerLost where there are none to be had."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        while True:
            try:
                self.start()
                return self._forked()
            except ConnectionError:
                continue  # with another server: there are not many of those
            except OSError as refused:
                # Descriptors, pidfds or sockets that can't be had now can't be had by asking faster.
                raise WorkerLost(f"the system refuses another worker: {refused}") from refused

    def _forked(self) -> Worker:
        """ConnectionError where the server is gone."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._control is None or self._server is None:
                raise BrokenPipeError
            server = self._server
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        try:
            return Worker(ours, server)
        except TimeoutError:
            server.kill()
            raise
        except WorkerLost as gone:
            ours.close()
            with suppress(subprocess.TimeoutExpired):
                server.wait(timeout=_END_SECONDS)
                raise BrokenPipeError from gone
            raise WorkerLost("the system refuses another process", remedy="raise ulimit -u or pids.max") from gone

    def cpu_seconds(self) -> float:
        """Of the idle workers, since they were started."""
        with self._lock:
            return sum(cpu_seconds(worker.pid) for worker in self._idle)

    def give_back(self, worker: Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def close(self) -> None:
        """All of them are gone when this returns; asked again, it starts anew."""
        with self._lock:
            self._let_go()
            self._starts = 0

    def _let_go(self) -> None:
        while self._idle:
            self._idle.pop().end()
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._control = self._server = None
