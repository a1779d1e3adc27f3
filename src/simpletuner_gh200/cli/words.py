"""Words of the command line: those that are passed on to SimpleTuner, and those that a command says while it works."""

from __future__ import annotations

import sys

from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.errors import UsageError


def say_on_a_terminal(words: str) -> None:
    """A passing remark, on standard error, where somebody is looking."""
    if sys.stderr.isatty():
        say(f"gh200: {words}", error=True)


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
