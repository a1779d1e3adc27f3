"""The rank's end of the line to ``gh200 train``: it ends with its launcher, and tells it how far it is.

accelerate and torchrun stand between the two and pass nothing on but the environment, so the rank calls back: an
abstract socket whose random name is in the environment. It needs no folder, so a full disk can't cut it. Over it the
launcher hands out the lock of the output folder, which is held until the last process of the job is gone, and the
rank sends its phase and, at the end, its summary.

Nobody survives the launcher: the kernel kills a rank whose parent died, and a thread in the rank, and in whatever it
forked, ends the process group when the line goes dead. What was half-written then is not believed by the next start.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.config.environment import LIFELINE
from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.memory.sharing import peer_of

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What ends a run. The launcher and the ranks hear it, and nobody between them."""

RELEASE = signal.SIGCONT
"""From the launcher to ranks that were asked to stop: every one has said its last word. Means nothing to others."""

MOST_DESCRIPTORS = 4
_PR_SET_PDEATHSIG = 1
_ANSWER_SECONDS = 30.0
_libc = ctypes.CDLL(None, use_errno=True)

logger = logging.getLogger("simpletuner_gh200")


def address(token: str) -> str:
    """In the abstract namespace: gone with the launcher, whatever ended it."""
    return f"\0simpletuner-gh200-{os.getuid()}-{token}"


def die_with_parent() -> None:
    """The kernel is to kill this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def hear_no_stops() -> None:
    """This process, and what it starts, is to take no notice of them; a rank hears them again, once it is held."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


class Lifeline:
    """Held for as long as the rank lives."""

    def __init__(self, connection: socket.socket, descriptors: tuple[int, ...] = ()) -> None:
        self._connection = connection
        self._descriptors = descriptors
        """Never closed: whatever they hold, the output folder's lock, ends with the process."""
        self._pid = os.getpid()
        self._released = threading.Event()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Lifeline | None:
        """The line to this rank's launcher; None where it was started in another way. Raises where that is gone."""
        token = environment.get(LIFELINE)
        if not token:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(address(token))
            if peer_of(connection)[1] != os.getuid():
                raise ConnectionRefusedError("another user answers")
            connection.sendall(b"%s\n" % json.dumps({"rank": environment.get("RANK") or "0"}).encode())
            _, descriptors, _, _ = socket.recv_fds(connection, 1, MOST_DESCRIPTORS)
        except OSError as refused:
            connection.close()
            raise RunFailed(
                f"`gh200 train`, which started this rank, has ended: {refused}",
                remedy=f"start it again; where ranks run in a network namespace of their own, unset {LIFELINE} in it",
            ) from refused
        connection.settimeout(None)
        return cls(connection, tuple(descriptors))

    def hold(self) -> None:
        """From now on this process, and what it forks, ends with the launcher. Signals are for it again."""
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        signal.signal(RELEASE, lambda *_: self._released.set())
        self._watch()
        os.register_at_fork(after_in_child=self._watch)

    def tell(self, **message: Any) -> None:
        """Send the launcher something JSON-able; in a forked child nothing: it speaks for nobody."""
        if os.getpid() == self._pid:
            # A launcher that is gone takes this process with it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._connection.sendall(b"%s\n" % json.dumps(message, default=str).encode())

    def part(self, summary: Mapping[str, Any]) -> None:
        """The last word. One that was asked to stop then waits for the others to say theirs.

        torchrun ends the other ranks when one ends, and hosts the store that they may still need.
        """
        self._released.clear()
        self.tell(summary=summary)
        if summary.get("status") == "interrupted":
            self._released.wait()

    def _watch(self) -> None:
        try:
            threading.Thread(target=self._end_with_launcher, name="gh200-lifeline", daemon=True).start()
        except RuntimeError as refused:
            logger.debug("gh200: the connection to the launcher is watched by the kernel alone: %s", refused)

    def _end_with_launcher(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.recv(1)  # the launcher never sends again, so this is the end
        os.killpg(os.getpgrp(), signal.SIGKILL)
