"""Tables and paragraphs: wrapped on a terminal, and whole lines for whoever reads a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from simpletuner_gh200.telemetry.redact import printable

UNBOUNDED = 10_000
"""Columns, where no screen ends a line."""


def paragraph(console: Console, text: str, *, first: str = "", indent: str = "", style: str = "") -> None:
    """``text`` after ``first``, wrapped between words on a terminal; whole lines where the output is read by others."""
    for number, line in enumerate(printable(text, lines=True).splitlines() or [""]):
        begin = first if number == 0 else indent
        lines = (
            textwrap.wrap(
                line,
                width=max(console.width, 20),
                initial_indent=begin,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            if console.is_terminal
            else [begin + line]
        )
        for shown in lines or [begin.rstrip()]:
            console.print(Text(shown, style=style), soft_wrap=True)


def show_table(
    console: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    right: Sequence[int] = (),
) -> None:
    """As wide as its rows where others read it. ``right``: numbers of columns that are justified to the right."""
    table = Table(title=Text(printable(title)) if title else None, title_justify="left", show_header=any(headings))
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell, lines=True)) for cell in row))
    if not console.is_terminal:
        console.width = UNBOUNDED
    console.print(table)
