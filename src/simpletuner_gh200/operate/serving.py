"""SimpleTuner's server with the extension on: its own command, in our place, in an environment that asks for us."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from simpletuner_gh200.config.environment import SWITCH, switched_off
from simpletuner_gh200.operate import preflight


def serve(arguments: Sequence[str], say: Callable[[str], None]) -> NoReturn:
    """Become ``simpletuner server``. UsageError where there is no SimpleTuner, or none that imports."""
    preflight.check_installation(say, trusting=True)
    environment = environment_of_server(os.environ, Path(sys.executable))
    os.execve(sys.executable, command(arguments), environment)


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "simpletuner", "server", *arguments]


def environment_of_server(environment: Mapping[str, str], python: Path) -> dict[str, str]:
    """The extension on, unless ``0`` switches it off, and this Python's own commands found first.

    A job that the page starts calls accelerate by its name.
    """
    beside, path = str(python.parent), environment.get("PATH", os.defpath)
    folders = path.split(os.pathsep)
    path = path if beside in folders else os.pathsep.join((beside, *folders))
    asked = "0" if switched_off(environment) else "1"
    return {**environment, SWITCH: asked, "PATH": path}
