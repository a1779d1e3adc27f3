"""A run under watch: signals reach its ranks, their words reach us, and nothing of it is left when it has ended.

One loop, no threads. accelerate or torchrun, the process in the middle, is told nothing, nor does it hear what a
scheduler tells every process of a job: it would print a traceback for every interrupt, and torchrun ends its ranks
after half a minute. When a run is to stop, the ranks get the signal and some seconds to end, the middle is halted, and
then whatever carries this run's token in its environment is killed. While ranks save, the middle goes on: torchrun
hosts the store that they make groups with.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import psutil

from simpletuner_gh200.config.environment import LIFELINE
from simpletuner_gh200.memory.sharing import peer_of
from simpletuner_gh200.operate.ending import Outcome, outcome_of
from simpletuner_gh200.seams.lifeline import RELEASE, STOPS, address, die_with_parent, hear_no_stops
from simpletuner_gh200.seams.preemption import ASKING

GRACE_SECONDS = 5.0
"""For the ranks to end by themselves after a signal. What they leave half-done then is not believed later."""

SWEEP_SECONDS = 3.0

ECHO_SECONDS = 2.0
"""In which the same request, repeated, is still the first one: a job that Slurm preempts hears SIGTERM twice within
milliseconds, and the second would cost it the checkpoint that the first asked for. Nobody types that fast."""

AT_ONCE = (signal.SIGQUIT,)
PASSED_ON = (signal.SIGUSR2,)


def watch(
    command: Sequence[str],
    environment: Mapping[str, str],
    lock: int | None = None,
    *,
    checkpoint_on: Sequence[int] = ASKING,
) -> Outcome:
    """Run ``command`` to its end. ``lock``: a descriptor that every rank is to hold too.

    ``checkpoint_on``: signals that ask for a checkpoint before the end, where the ranks are at a point to write one.
    """
    with _Supervisor(secrets.token_hex(16), () if lock is None else (lock,), checkpoint_on) as supervisor:
        return supervisor.run(command, environment)


class _Rank:
    """One rank's end of the line."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.process = os.pidfd_open(pid)
        self.name: str | None = None
        """None until it speaks: nobody else's summary is its own."""
        self.checkpoints = False
        """Does it write a checkpoint when it is asked for one?"""
        self._unread = b""

    def messages(self) -> Iterator[dict[str, Any]]:
        """What has come since, whole lines only."""
        while True:
            try:
                data = self.connection.recv(1 << 16)
            except (BlockingIOError, ConnectionResetError):
                return
            if not data:
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                yield json.loads(line)

    def signal(self, number: int) -> None:
        _signal(self.process, number)

    def close(self) -> None:
        self.connection.close()
        os.close(self.process)


class _Supervisor:
    def __init__(self, token: str, descriptors: tuple[int, ...], checkpoint_on: Sequence[int]) -> None:
        self._token = token
        self._descriptors = descriptors
        self._checkpoint_on = checkpoint_on
        self._interrupted: int | None = None
        self._hurried = False
        """The first signal that was to stop the run."""
        self._phases: dict[str, str] = {}
        """What each rank was at last, in words."""
        self._summaries: dict[str, dict[str, Any]] = {}
        self._ranks: list[_Rank] = []
        self._deadline: float | None = None
        """When patience with a run that is to stop ends; None while it runs, and while it writes a checkpoint."""
        self._asked_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._received: list[int] = []
        self._before: dict[int, Any] = {}
        self._middle: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Supervisor:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address(self._token))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wakeup, self._wake = socket.socketpair()
        for end in (self._wakeup, self._wake):
            end.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._welcome)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._obey)
        self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (*STOPS, *AT_ONCE, *PASSED_ON):
            # nohup and shells without job control have a signal ignored: then it means nothing to the run either.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_failure: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        if self._middle is not None and self._middle.returncode is None:
            self._end_everything()  # an exception of our own: nothing may be left of the run either
        for rank in self._ranks:
            rank.close()
        for each in (self._listener, self._wakeup, self._wake, self._selector):
            each.close()

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> Outcome:
        self._middle = subprocess.Popen(
            command,
            env={**environment, LIFELINE: self._token},
            start_new_session=True,
            preexec_fn=_begin_middle,  # no threads here that could hold a lock
        )
        middle = os.pidfd_open(self._middle.pid)
        try:
            self._wake_at_end_of(middle)
            while not self._over(middle):
                for key, _ in self._selector.select(self._patience()):
                    key.data()
            returned = self._conclude(stopped=self._interrupted is not None)
        finally:
            os.close(middle)
        found = outcome_of(returned, self._interrupted, self._phases, self._summaries)
        return replace(found, hurried=self._hurried)

    def _over(self, middle: int) -> bool:
        if self._interrupted is None:
            return _ended(middle)
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return late or all(_ended(rank.process) for rank in self._ranks)

    def _patience(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def _conclude(self, *, stopped: bool) -> int:
        assert self._middle is not None
        # What a completed run started for afterwards, an upload say, is the user's and stays.
        if stopped or self._middle.poll() is None or self._middle.returncode != 0:
            self._end_everything()
        else:
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)
        returned = self._middle.wait()
        for rank in self._ranks:
            self._listen_to(rank)
        return returned

    # -- what happens ----------------------------------------------------------------------------------

    def _welcome(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _address = self._listener.accept()
            pid, user = peer_of(connection)
            if user != os.getuid():
                connection.close()
                return
            try:
                rank = _Rank(connection, pid)
            except ProcessLookupError:  # gone before it was heard
                connection.close()
                return
            try:
                socket.send_fds(connection, [b"!"], self._descriptors)
            except (BrokenPipeError, ConnectionResetError):  # killed between its call and our answer
                rank.close()
                return
            connection.setblocking(False)
            self._ranks.append(rank)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(rank))
            self._wake_at_end_of(rank.process)
            if self._interrupted is not None:
                rank.signal(signal.SIGTERM)

    def _wake_at_end_of(self, process: int) -> None:
        def ended() -> None:
            self._selector.unregister(process)
            if self._interrupted is not None and self._summaries:
                self._expect_the_end()

        self._selector.register(process, selectors.EVENT_READ, ended)

    def _hear(self, rank: _Rank) -> None:
        self._listen_to(rank)
        if _ended(rank.process) or _hung_up(rank.connection):
            self._selector.unregister(rank.connection)

    def _listen_to(self, rank: _Rank) -> None:
        for message in rank.messages():
            name = rank.name = str(message.get("rank", rank.name or "0"))
            if "phase" in message:
                self._phases[name] = str(message["phase"])
                rank.checkpoints = bool(message.get("checkpoints"))
            if "summary" in message:
                self._summaries[name] = message["summary"]
                if self._interrupted is not None:
                    self._expect_the_end(failed=message["summary"].get("status") == "failed")
                else:  # one that somebody else has interrupted
                    rank.signal(RELEASE)

    def _expect_the_end(self, *, failed: bool = False) -> None:
        """Of a run that is to stop a rank has said its last word, or has ended.

        Ranks wait for ever for one that failed; once all have spoken, what is left is the interpreter's. Until then the
        middle goes on, and those that have spoken stay.
        """
        if failed or all(rank.name in self._summaries or _ended(rank.process) for rank in self._ranks):
            self._halt_middle()
            self._tell_ranks(RELEASE)
            soon = time.monotonic() + GRACE_SECONDS
            self._deadline = soon if self._deadline is None else min(self._deadline, soon)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        while self._received:
            number = self._received.pop(0)
            if number in PASSED_ON:
                self._tell_ranks(number)
            elif self._is_echo(number):
                continue
            elif number in AT_ONCE or self._interrupted is not None:
                self._interrupted, self._hurried = self._interrupted or number, True
                self._deadline = time.monotonic()
            else:
                self._stop(number)

    def _is_echo(self, number: int) -> bool:
        soon = time.monotonic() - self._asked_at < ECHO_SECONDS
        return number in ASKING and number == self._interrupted and soon

    def _stop(self, number: int) -> None:
        self._interrupted = number
        self._asked_at = time.monotonic()
        for rank in self._ranks:  # it may just have said that it is ready
            self._listen_to(rank)
        if number in self._checkpoint_on and self._ranks and all(rank.checkpoints for rank in self._ranks):
            self._tell_ranks(ASKING[0])  # as long as it takes; a second signal ends the patience
        else:
            self._halt_middle()
            self._deadline = time.monotonic() + GRACE_SECONDS
            # What only asks for something would be lost on a rank that is not at a point to do it.
            self._tell_ranks(signal.SIGTERM if number in ASKING else number)

    def _tell_ranks(self, number: int) -> None:
        for rank in self._ranks:
            rank.signal(number)

    def _halt_middle(self) -> None:
        """So that it neither prints about its ranks nor does anything about them."""
        if self._middle is not None and self._middle.poll() is None:
            self._middle.send_signal(signal.SIGSTOP)

    def _end_everything(self) -> None:
        if self._middle is not None and self._middle.poll() is None:
            self._middle.kill()
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        deadline = time.monotonic() + SWEEP_SECONDS
        # One that is dying shows no environment any more, and is still there.
        while _kill_marked(self._token) or not all(_ended(rank.process) for rank in self._ranks):
            if time.monotonic() >= deadline:
                return
            time.sleep(0.02)


def _begin_middle() -> None:
    die_with_parent()
    hear_no_stops()


def _kill_marked(token: str) -> int:
    """Kill every process of this user that was started with ``token`` in its environment; how many there were."""
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(LIFELINE) == token:
                process.kill()
                found += 1
    return found


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


def _ended(process: int) -> bool:
    with selectors.PollSelector() as look:
        look.register(process, selectors.EVENT_READ)
        return bool(look.select(0))


def _hung_up(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
