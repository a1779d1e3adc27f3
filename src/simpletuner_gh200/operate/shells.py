"""Spelling assignments for a shell, so that no value can be anything but a value."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.environment import Exports

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Shell:
    """How one family of shells sets and unsets an exported variable."""

    set: str
    unset: str
    quote: Callable[[str], str]


def _quote_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _quote_csh(text: str) -> str:
    """Single quotes, except that ! means history even there."""
    return "'" + text.replace("'", "'\\''").replace("!", "\\!") + "'"


_POSIX = Shell("export {name}={value}", "unset {name}", shlex.quote)
_CSH = Shell("setenv {name} {value};", "unsetenv {name};", _quote_csh)
SHELLS: Mapping[str, Shell] = {
    "bash": _POSIX,
    "zsh": _POSIX,
    "sh": _POSIX,
    "dash": _POSIX,
    "ksh": _POSIX,
    "fish": Shell("set -gx {name} {value}", "set -e {name}", _quote_fish),
    "csh": _CSH,
    "tcsh": _CSH,
}


def spell(exports: Exports, shell: str) -> str:
    """The commands to evaluate, one a line."""
    family = _family(shell)
    for name in (*exports.values, *exports.unset):
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} can't be the name of a variable")
    lines = [family.set.format(name=name, value=family.quote(value)) for name, value in exports.values.items()]
    return "\n".join([*lines, *(family.unset.format(name=name) for name in exports.unset)])


def _family(shell: str) -> Shell:
    try:
        return SHELLS[shell]
    except KeyError:
        raise UsageError(f"unknown shell {shell!r}", remedy=f"accepted: {', '.join(SHELLS)}") from None


def shell_in_use(environment: Mapping[str, str], *, parent: int | None = None, proc: Path = Path("/proc")) -> str:
    """The shell that asks: our parent process if it is one, else the login shell, else plain sh."""
    try:
        name = (proc / str(parent or os.getppid()) / "comm").read_text(encoding="utf-8").strip().lstrip("-")
    except OSError:
        name = ""
    login = Path(environment.get("SHELL", "")).name
    return next((candidate for candidate in (name, login) if candidate in SHELLS), "sh")
