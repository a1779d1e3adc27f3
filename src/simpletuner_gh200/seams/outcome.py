"""What became of a run, as this rank knows it: its status and reason, and whose fault it may be."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200 import __version__
from simpletuner_gh200.config.environment import text
from simpletuner_gh200.errors import GH200Error, UsageError
from simpletuner_gh200.units import MIB, format_bytes
from simpletuner_gh200.upstream.rules import refuses


@dataclass
class RunOutcome:
    """What became of the run, as the summary and the exit code report it."""

    status: str = "not started"
    """``not started``, ``training``, ``completed``, ``interrupted`` or ``failed``."""
    reason: str | None = None
    global_step: int = 0
    max_train_steps: int | None = None
    output_dir: str | None = None
    exit_code: int = 1
    """What the process returns unless the run completed."""
    _failure: BaseException | None = None

    def fail(self, failure: BaseException) -> None:
        """The reason is the failure's own words; where a full disk is behind it, that comes last."""
        if failure is self._failure:
            return  # on its way out it passes several places that listen
        before_training, self._failure = self.status == "not started", failure
        self.status, self.reason = "failed", f"{type(failure).__name__}: {failure}"
        if before_training and (words := refused_by_simpletuner(failure)):
            self.reason, self.exit_code = words, UsageError.exit_code
        if isinstance(failure, GH200Error):
            self.reason, self.exit_code = str(failure), failure.exit_code
        cause = disk_full(failure, [self.output_dir] if self.output_dir else [])
        if cause is not None:
            self.reason = f"{self.reason}\n  cause: {cause}"

    def interrupt_by_user(self) -> None:
        self.interrupt("interrupted by the user")

    def interrupt(self, reason: str, exit_code: int = 128 + signal.SIGINT) -> None:
        self.status, self.reason, self.exit_code = "interrupted", reason, exit_code


# -- does SimpleTuner refuse the configuration? ----------------------------------------------------------------

REFUSING = (ValueError, KeyError, TypeError, NotImplementedError, OSError, ModuleNotFoundError, SystemExit)
"""Exceptions by which it does so; many of them say other things too."""

NETWORK = frozenset({"huggingface_hub", "httpx", "httpcore", "requests", "urllib3", "socket"})
"""Modules whose exceptions say that a hub could not be reached: that is no answer. diffusers says so by an OSError."""


LONGEST = 300


def refusal(failure: BaseException) -> str | None:
    """SimpleTuner's words for what is wrong, in a line; None where ``failure`` is about something else."""
    first = innermost_of(failure)
    words = str(first).strip()
    if type(first) is OSError or type(first).__module__.partition(".")[0] in NETWORK or "meta tensor" in words:
        return None
    if isinstance(first, KeyError):
        return f"it has no {words}"
    # Of a traceback in its words, as its parser's, the end says what is wrong.
    return words.splitlines()[-1].strip() if "Traceback (" in words else innermost(failure)


def refused_by_simpletuner(failure: BaseException) -> str | None:
    """The same words for a start, where nothing stood in for anything; None where ``failure`` is no refusal of its."""
    first = innermost_of(failure)
    rooms = [frame.f_globals.get("__name__", "") for frame, _line in traceback.walk_tb(first.__traceback__)]
    raised_in = next((room for room in reversed(rooms) if room.startswith("simpletuner")), "")
    theirs = raised_in.startswith("simpletuner.") or raised_in == "simpletuner"
    words = refusal(first) if theirs and isinstance(first, REFUSING) else None
    return refuses(words) if words else None


def innermost(failure: BaseException) -> str:
    """The exception that was first, in a line: lazy imports, transformers' for one, hide it behind their own."""
    failure = innermost_of(failure)
    words = " ".join(str(failure).split()).removesuffix(f" ({getattr(failure, 'path', None)})")
    return f"{type(failure).__name__}: {words}"[:LONGEST]


def innermost_of(failure: BaseException) -> BaseException:
    while deeper := failure.__cause__ or (None if failure.__suppress_context__ else failure.__context__):
        failure = deeper
    return failure


# -- whose bug may it be? -----------------------------------------------------------------------------------

MARK = "gh200: simpletuner-gh200"


def mark(failure: BaseException, seams: Iterable[str]) -> None:
    """A note (PEP 678) on an exception that passes us, once: it goes along into a webhook, the Web UI or an issue.

    Errors of ours say for themselves whose they are.
    """
    notes = getattr(failure, "__notes__", ())
    if not isinstance(failure, GH200Error) and not any(note.startswith(MARK) for note in notes):
        failure.add_note(how_to_run_without(seams))


def how_to_run_without(seams: Iterable[str]) -> str:
    """``seams``: the names of those in place; ``trainer.train`` and ``trainer.init_hooks`` are one group."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in seams:
        room, _, place = name.partition(".")
        groups[room].append(place)
    grouped = ", ".join(f"{room} ({', '.join(places)})" for room, places in groups.items()) or "no place"
    return (
        f"{MARK} {__version__} was active here, with seams in place at {grouped}. To see whether it fails"
        " without them too: the same command with SIMPLETUNER_GH200=0, or plain `simpletuner train`."
    )


# -- a full disk, in whatever exception it comes as ------------------------------------------------------------

FULL = 16 * MIB
"""Less than this is free on a disk that a checkpoint did not fit on."""

_SIGNS = (
    "No space left on device",
    "StorageFull",
    "Disk quota exceeded",
    "PytorchStreamWriter failed",
    "iostream error",
)
"""Of safetensors and of torch, whose writer forgets the cause."""


def disk_full(failure: BaseException, places: Iterable[str]) -> str | None:
    """Which disk is full, if that is what ``failure`` comes from; None otherwise."""
    chain = list(_chain(failure))
    certain = any(isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT) for each in chain)
    if not certain and not any(sign in str(each) for each in chain for sign in _SIGNS):
        return None
    named = [str(each.filename) for each in chain if isinstance(each, OSError) and isinstance(each.filename, str)]
    for place in (*named, *places, os.getcwd(), text("TMPDIR") or "/tmp"):
        path = Path(place).absolute()
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.is_dir())).free
            if free < FULL:
                return f"the disk of {place} is full ({format_bytes(free)} left)"
    return "a disk is full, or its quota used up" if certain else None


def _chain(failure: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        yield failure
        failure = failure.__cause__ or failure.__context__
