"""The way in and out of every command: streams that take any text, words with nothing that could steer the terminal.

Commands say plain lines with ``say``, and paragraphs and tables with ``cli.tables``; both show escaped what a name or a
value holds that doesn't print.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.telemetry.redact import printable


def say(words: object, *, error: bool = False) -> None:
    """One line, or several, on standard output or standard error."""
    print(printable(str(words), lines=True), file=sys.stderr if error else sys.stdout, flush=True)


def say_on_a_terminal(words: str) -> None:
    """A passing remark, on standard error, where somebody is looking."""
    if sys.stderr.isatty():
        say(f"gh200: {words}", error=True)


@contextmanager
def stdout_kept_for_json(wanted: bool) -> Iterator[None]:
    """While this lasts, what we or the processes we start would write there goes to standard error instead.

    A no-op where no JSON is ``wanted``, so that a command needs no second way through itself.
    """
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept, ours = os.dup(1), sys.stdout
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = ours
        os.dup2(kept, 1)
        os.close(kept)


def screen(*, stderr: bool = False) -> Console:
    """A console for tables and styles."""
    return Console(stderr=stderr)


def upstream_spelling(words: list[str], env: str | None) -> tuple[list[str], str | None]:
    """SimpleTuner also takes ``key=value`` without dashes, and ``env=NAME`` and ``example=NAME`` among them."""
    flags: list[str] = []
    for position, word in enumerate(words):
        before = words[position - 1] if position else ""
        after_flag = before.startswith("--") and "=" not in before
        if not word.startswith("--") and "=" not in word and not after_flag:
            raise UsageError(f"{word!r} is not a flag", remedy=f"did you mean --config {word}?")
        if word.startswith("--") or "=" not in word or after_flag:
            flags.append(word)
        elif word.startswith("env="):
            env = word.removeprefix("env=")
        elif word.startswith("example="):
            env = "examples/" + word.removeprefix("example=")
        else:
            flags.append(f"--{word}")
    return flags, env


# -- before any command runs: three standard streams -------------------------------------------------


def prepare_process() -> None:
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # In a locale without the characters, LC_ALL=C say, they are replaced, and not the reason for a traceback.
        if "utf" not in (stream.encoding or "").lower():
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def open_closed_streams() -> None:
    """A stream that is closed becomes one to nowhere: else the next file to be opened would take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
