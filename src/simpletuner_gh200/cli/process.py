"""What a process needs before any command runs: three standard streams that take any text, and enough stack."""

from __future__ import annotations

import os
import resource
import sys
import threading

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.units import MIB, format_bytes

ENOUGH_STACK = 8 * MIB
"""What systems give by default."""

LEAST_STACK = MIB
"""Compression libraries put some hundred KiB there."""


def prepare_process() -> None:
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # In a locale without the characters, LC_ALL=C say, they are replaced, and not the reason for a traceback.
        if "utf" not in (stream.encoding or "").lower():
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    ensure_stack()


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


def ensure_stack() -> None:
    """Raise a stack limit that is too small, for the processes we start too; refuse where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_STACK:
        return
    wanted = ENOUGH_STACK if hard == resource.RLIM_INFINITY else min(ENOUGH_STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    threading.stack_size(ENOUGH_STACK)
    if wanted < LEAST_STACK:
        raise UsageError(
            f"the stack is limited to {format_bytes(wanted)}, and {format_bytes(LEAST_STACK)} are needed",
            remedy="ulimit -s 8192",
        )
