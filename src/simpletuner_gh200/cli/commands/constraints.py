"""``gh200 constraints``: the versions that SimpleTuner is tested with, for pip or uv."""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.upstream import tested


def constraints(
    release: Annotated[
        str | None, typer.Option("--release", help="A tested SimpleTuner release. Default: the newest for this Python.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave out what only CUDA needs.")] = False,
) -> None:
    """Print the versions that SimpleTuner is tested with, one `name==version` per line.

    For environments that are built elsewhere, an image say. The same on x86-64 and aarch64.

    Examples:

      gh200 constraints > pins.txt && pip install -c pins.txt 'simpletuner[cuda13]==4.10.1'

      gh200 constraints --release 3.1.6 --cpu
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    chosen = release or tested.choose(python, platform.machine()).release
    pins = tested.constraints(chosen, cpu=cpu)
    print(pins, end="")


COMMAND = Command("constraints", constraints, panel="Before a run", order=6)
