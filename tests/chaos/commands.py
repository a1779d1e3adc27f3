"""The real ``gh200`` command, started from outside, and everything that belongs to it: processes, output, ending."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.workbench import clean_environment

MARK = "GH200_CHAOS_TRIAL"
"""In the environment of every process that a trial starts: so it is found whoever its parent is."""

PATIENCE = 300.0
"""Nothing here waits longer: a trial that hangs fails. It says nothing about how long something should take."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


@dataclass(frozen=True)
class Ended:
    """What a user has of a command that has ended."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """What stands at the end of the terminal, without SimpleTuner's colours; cause and remedy hang below it."""
        lines = [line for line in _COLOURS.sub("", self.err or self.out).splitlines() if line[:1].strip()]
        return lines[-1] if lines else ""

    def explain(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-6000:]}"


class Command:
    """A started command. Its streams go to files, so that no reader is needed and what it says can be watched."""

    def __init__(
        self,
        *arguments: str | Path,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        limit: Callable[[], None] | None = None,
        through: Sequence[str] = (),
        redirection: str = "",
    ) -> None:
        """``limit`` runs in the child; ``through``: words before the command (nohup); ``redirection``: a shell's."""
        self._token = secrets.token_hex(8)
        self._out, self._err = (folder / f"{self._token}.{name}" for name in ("out", "err"))
        command = [*through, sys.executable, "-m", "simpletuner_gh200", *map(str, arguments)]
        if redirection:
            command = ["bash", "-c", f'exec "$@" {redirection}', "bash", *command]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**clean_environment(), **(environment or {}), MARK: self._token},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=limit,
            )

    # -- its processes ---------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Every living process of this command, by number, with its command line."""
        found = {}
        mark = f"{MARK}={self._token}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and mark in _read(entry / "environ").split(b"\0"):
                found[int(entry.name)] = _read(entry / "cmdline").replace(b"\0", b" ").decode(errors="replace")
        return found

    def middle(self) -> int | None:
        """accelerate or torchrun."""
        return self._first(lambda words: "accelerate.commands.launch" in words or "torch.distributed.run" in words)

    def rank(self) -> int | None:
        middle = self.middle()
        return self._first(
            lambda words: "simpletuner_gh200.launch" in words and "-m accelerate" not in words, child_of=middle
        )

    def _first(self, fits: Callable[[str], bool], child_of: int | None = None) -> int | None:
        for number, words in sorted(self.processes().items()):
            if fits(words) and (child_of is None or _parent(number) == child_of):
                return number
        return None

    def nothing_left(self, patience: float = 60.0) -> str:
        """What still runs after ``patience`` seconds, in words; nothing: an empty text."""
        deadline = time.monotonic() + patience
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return "\n".join(f"{number}: {words}" for number, words in left.items())

    # -- what it does ----------------------------------------------------------------------------------

    def said(self) -> str:
        return _COLOURS.sub("", self._text(self._out) + self._text(self._err))

    def wait_until(self, happened: Callable[[], object], what: str) -> None:
        """Until ``happened()`` is true, in small steps; fails where the command ends before."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            code = self.process.poll()
            assert code is None or happened(), f"ended with {code} before {what}\n{self.said()[-6000:]}"
            assert time.monotonic() < deadline, f"never: {what}\n{self.said()[-6000:]}"
            time.sleep(0.005)

    def wait_for_words(self, words: str) -> None:
        self.wait_until(lambda: words in self.said(), f"it said {words!r}")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> Ended:
        code = self.process.wait(PATIENCE)
        return Ended(code, self._text(self._out), self._text(self._err))

    def end_of_all(self) -> Ended:
        """Its end, and that nothing of it is left."""
        ended = self.end()
        assert self.nothing_left() == "", ended.explain()
        return ended

    def clear_away(self) -> None:
        """Whatever a failed trial left."""
        for number in self.processes():
            if number != self.process.pid:
                os.kill(number, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @staticmethod
    def _text(path: Path) -> str:
        return path.read_text(encoding="utf-8", errors="replace")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # gone meanwhile, or of another user
        return b""


def _parent(number: int) -> int:
    words = _read(Path(f"/proc/{number}/stat")).rpartition(b")")[2].split()
    return int(words[1]) if words else 0


def without_roots_rights() -> None:
    """For ``limit``: file permissions mean something for root, too, in what is started."""
    if os.getuid() == 0:
        libc = ctypes.CDLL(None)
        for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
