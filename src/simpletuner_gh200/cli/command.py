"""A subcommand: a name, where it shows in ``--help``, and the function or sub-application behind it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that hands on what it does not know."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Run = Annotated[
    Path | None,
    typer.Argument(
        help="A run: its output folder, project folder or configuration. Default: the one here, a live one first."
    ),
]
Configuration = Annotated[Path, typer.Argument(help="Training configuration: JSON, TOML or ENV.")]

PANELS = ("Start here", "More: before a run", "More: runs", "More: measure", "More: SimpleTuner's releases")
"""Of ``gh200 --help``: first the seven commands that a beginner needs, in that order."""


@dataclass(frozen=True)
class Command:
    """Exported as ``COMMAND`` by one file in ``cli/commands``. ``run`` is a typer callback or a Typer app."""

    name: str
    run: Callable[..., Any] | typer.Typer
    panel: str
    """One of ``PANELS``."""
    order: int = 50
    """In its panel: the lower, the earlier it is needed."""
    context_settings: dict[str, Any] | None = None
    add_help_option: bool = True

    @property
    def place(self) -> tuple[int, int, str]:
        """Where it stands in ``gh200 --help``."""
        known = PANELS.index(self.panel) if self.panel in PANELS else len(PANELS)
        return known, self.order, self.name


def conclude(document: Mapping[str, Any], as_json: bool, show: Callable[[], object], *, ok: bool = True) -> None:
    """The end of a command: one JSON object, or what ``show`` tells people; exit code 1 where it is not ``ok``."""
    print(json.dumps(document)) if as_json else show()
    if not ok:
        raise typer.Exit(1)


def flowing(text: str | None) -> str | None:
    """Help as it is written in a source, with each paragraph in one line: where it breaks is the screen's business."""
    if text is None:
        return None
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(line.strip() for line in paragraph.splitlines()) for paragraph in paragraphs)
