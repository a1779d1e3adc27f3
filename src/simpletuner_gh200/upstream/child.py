"""A question to the installed SimpleTuner, asked in a process of its own, which imports it: JSON in, JSON out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from simpletuner_gh200.config.environment import NO_BYTECODE, SWITCH, for_child

DEADLINE_SECONDS = 300.0
"""A file system that takes longer to import SimpleTuner from has other problems than a misspelt key."""


class NoAnswer(Exception):
    """Why there is none, in words. ``killed``: a signal ended the process."""

    def __init__(self, reason: str, *, killed: bool = False) -> None:
        super().__init__(reason)
        self.killed = killed


def ask(command: Sequence[str], wanted: str, question: object = None, **variables: str) -> dict[str, Any]:
    """The last line that the process prints, with the key that is ``wanted``. Raises NoAnswer.

    It is started in a folder that goes with it: SimpleTuner leaves files behind.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="gh200-asks-") as folder:
            ended = subprocess.run(
                command,
                cwd=folder,
                env={**child_environment(), **variables},
                input=json.dumps(question, default=str).encode(),
                capture_output=True,
                timeout=DEADLINE_SECONDS,
            )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"it was not done after {DEADLINE_SECONDS:g} s") from None
    except OSError as refused:
        raise NoAnswer(f"no process could be started: {refused}") from None
    if ended.returncode < 0:
        raise NoAnswer(f"the process that imports it was ended by signal {-ended.returncode}", killed=True)
    printed, errors = (text.decode(errors="replace").strip().splitlines() for text in (ended.stdout, ended.stderr))
    try:
        found = json.loads(printed[-1])
    except (IndexError, ValueError):
        found = None
    if isinstance(found, dict) and wanted in found:
        return found
    last = [*printed, *errors][-1:] or ["no word of why"]
    raise NoAnswer(f"exit code {ended.returncode}: {last[0][:200]}")


def child_environment() -> dict[str, str]:
    """The child finds the same packages in the same order as we do, and no extension in SimpleTuner."""
    found = os.pathsep.join(dict.fromkeys(os.path.abspath(place) for place in sys.path))
    return for_child({SWITCH: "0", "PYTHONPATH": found}, without=("SIMPLETUNER_SKIP_TORCH", NO_BYTECODE))
