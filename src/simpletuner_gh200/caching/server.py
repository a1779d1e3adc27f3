"""The processes that work: one that imports what they need once, and forks each of them from itself.

Started as a program with one end of a socket and the name of a function that returns what workers are to do. It has
imported what that takes and nothing else, and has a single thread, so that forking it is safe; the rank, with its
threads and CUDA, is never forked. For each socket that it is sent it forks a worker, which answers jobs on that socket
until its other end is closed.

Nobody survives the rank: the server ends when its socket is closed, and the kernel kills its workers with it. What they
hand over is in memfds, which have no name and so can't be left behind.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from simpletuner_gh200.memory.mapping import memfd_of
from simpletuner_gh200.units import MIB

_LIBRARIES = ("OMP", "OPENBLAS", "MKL", "RAYON")
_ONE_THREAD = {**{f"{name}_NUM_THREADS": "1" for name in _LIBRARIES}, "OPENCV_FOR_THREADS_NUM": "1"}
"""There is a process for each core."""

_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(64 * MIB), "MALLOC_TRIM_THRESHOLD_": str(128 * MIB)}
"""So much freed memory a worker keeps for its next picture: fresh pages are nearly half of what a large one costs."""

ENVIRONMENT = {**_ONE_THREAD, **_KEPT_MEMORY}

_HEAD = struct.Struct("<QQ")
"""Bytes of the pickled message, and of the content behind it."""

_PR_SET_PDEATHSIG = 1
_NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Sent to a whole process group or job step; what becomes of the run is for the rank to decide."""


REFUSED = "refused"
"""Where an answer says what array comes with it: none, the worker has raised what the answer says, and goes on."""


class Serve(Protocol):
    """What a worker does with a job: an answer to be pickled, and an array to be handed over in shared memory."""

    def __call__(self, job: Any, content: bytes | None) -> tuple[Any, np.ndarray[Any, Any] | None]: ...


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    module, _, function = sys.argv[2].partition(":")
    serve: Serve = getattr(importlib.import_module(module), function)()
    server = os.getpid()
    while True:
        word, (*ends,), _flags, _address = socket.recv_fds(control, 1, 1)
        if not word:
            return
        child = -1
        with suppress(OSError):  # refused one more, it keeps those that there are: the other end finds itself closed
            child = os.fork() if ends else child
        if child == 0:
            control.close()
            _become_worker(server, ends[0], serve)
        for end in ends:
            os.close(end)


def _become_worker(server: int, end: int, serve: Serve) -> None:
    """In the child: never returns."""
    code = 1
    try:
        jobs = socket.socket(fileno=end)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else it died before the kernel knew
            _be_killed_first()
            send(jobs, (os.getpid(), None))
            _work(jobs, serve)
        code = 0
    finally:
        os._exit(code)


def _be_killed_first() -> None:
    """Where memory runs out, a picture is to be lost and not the run."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")


def _work(jobs: socket.socket, serve: Serve) -> None:
    while True:
        try:
            job, content = receive(jobs)
        except ConnectionError:
            return
        fd = None
        try:
            answer, array = serve(job, content)
            if array is not None:
                fd = memfd_of("picture", np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        except Exception as failure:  # noqa: BLE001 - it is no reason to end, and the rank is to know of it
            send(jobs, (repr(failure), REFUSED))
            continue
        send(jobs, (answer, None if array is None else (array.dtype.str, array.shape)), fd=fd)
        if fd is not None:
            os.close(fd)


# -- messages, the same both ways ------------------------------------------------------------------------------


def send(to: socket.socket, message: Any, content: Any = b"", fd: int | None = None) -> None:
    pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    head = _HEAD.pack(len(pickled), len(content))
    if fd is None:
        to.sendall(head)
    else:
        socket.send_fds(to, [head], [fd])
    to.sendall(pickled)
    if len(content):
        to.sendall(content)


def receive(of: socket.socket) -> tuple[Any, bytes | None]:
    message, content, fds = receive_with_fd(of)
    for fd in fds:
        os.close(fd)
    return message, content


def receive_with_fd(of: socket.socket) -> tuple[Any, bytes | None, list[int]]:
    """ConnectionError where the other end is gone."""
    head, fds, _flags, _address = socket.recv_fds(of, _HEAD.size, 1)
    try:
        head += _exactly(of.recv_into, _HEAD.size - len(head)) if head else b""
        if not head:
            raise ConnectionResetError("the other end is gone")
        size, behind = _HEAD.unpack(head)
        message = pickle.loads(_exactly(of.recv_into, size))
        return message, bytes(_exactly(of.recv_into, behind)) if behind else None, list(fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _exactly(receive_into: Callable[[memoryview], int], size: int) -> bytearray:
    found = bytearray(size)
    view = memoryview(found)
    while len(view):
        got = receive_into(view)
        if not got:
            raise ConnectionResetError("the other end is gone")
        view = view[got:]
    return found


if __name__ == "__main__":
    main()
