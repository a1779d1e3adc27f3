"""Whose bug may it be? One line on every traceback of SimpleTuner's that passes us: where we are, how to run without.

A note on the exception (PEP 678) rather than a line beside it: a traceback is copied into a webhook, the Web UI or an
issue, and the note goes with it. What the exception says of itself stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from simpletuner_gh200 import __version__
from simpletuner_gh200.errors import GH200Error

MARK = "gh200: simpletuner-gh200"


def whose(seams: Iterable[str]) -> str:
    """``seams``: the names of those that are in place."""
    return (
        f"{MARK} {__version__} was active here, with seams in place at {_grouped(seams)}. To see whether it fails"
        " without them too: the same command with SIMPLETUNER_GH200=0, or plain `simpletuner train`."
    )


def mark(failure: BaseException, seams: Iterable[str]) -> None:
    """Once per exception. Errors of ours say for themselves whose they are."""
    if not isinstance(failure, GH200Error) and not marked(failure):
        failure.add_note(whose(seams))


def marked(failure: BaseException) -> bool:
    return any(note.startswith(MARK) for note in getattr(failure, "__notes__", ()))


def _grouped(seams: Iterable[str]) -> str:
    """``trainer.train`` and ``trainer.init_hooks`` are ``trainer (train, init_hooks)``."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in seams:
        room, _, place = name.partition(".")
        groups[room].append(place)
    return ", ".join(f"{room} ({', '.join(places)})" for room, places in groups.items()) or "no place"
