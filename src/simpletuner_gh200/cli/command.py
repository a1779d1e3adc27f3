"""A subcommand: a name, where it shows in ``--help``, and the function or sub-application behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer


@dataclass(frozen=True)
class Command:
    """Exported as ``COMMAND`` by one file in ``cli/commands``. ``run`` is a typer callback or a Typer app."""

    name: str
    run: Callable[..., Any] | typer.Typer
    panel: str = "Commands"
    context_settings: dict[str, Any] | None = None
    add_help_option: bool = True
