"""Tables and paragraphs that never break a path or a key in the middle, however narrow the screen is."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

BETWEEN = 3
"""Columns that a rule and the blanks beside it take."""


def paragraph(console: Console, text: str, *, first: str = "", indent: str = "", style: str = "") -> None:
    """``text`` after ``first``, wrapped between words on a terminal; whole lines where the output is read by others."""
    for number, line in enumerate(text.splitlines() or [""]):
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
    bold: Sequence[bool] = (),
    right: Sequence[int] = (),
) -> None:
    """A table where every word fits into its column; else one block of lines per row, with the headings in it.

    ``bold``: which rows stand out. ``right``: numbers of columns that are justified to the right.
    """
    widths = column_widths(headings, rows, console.width)
    if widths is None:
        _blocks(console, headings, rows, title=title, bold=bold)
        return
    table = Table(title=Text(title) if title else None, title_justify="left", show_header=any(headings))
    for number, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        table.add_column(Text(heading), width=width, justify="right" if number in right else "left")
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if number < len(bold) and bold[number] else None)
    console.print(table)


def column_widths(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """What each column gets: at least its longest word, then room in proportion; None where that does not fit."""
    columns = [[heading, *(row[number] for row in rows)] for number, heading in enumerate(headings)]
    least = [max((len(word) for cell in column for word in cell.split()), default=1) for column in columns]
    whole = [max(len(line) for cell in column for line in (cell.splitlines() or [""])) for column in columns]
    room = width - BETWEEN * len(columns) - 1 - sum(least)
    if room < 0:
        return None
    wanted = [long - short for long, short in zip(whole, least, strict=True)]
    if sum(wanted) <= room:
        return [max(1, long) for long in whole]
    return [max(1, short + room * more // sum(wanted)) for short, more in zip(least, wanted, strict=True)]


def _blocks(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None, bold: Sequence[bool]
) -> None:
    if title:
        console.print(Text(title, style="italic"), soft_wrap=True)
    for number, (first, *others) in enumerate(rows):
        style = "bold" if number < len(bold) and bold[number] else ""
        paragraph(console, first, indent="  ", style=style)
        for heading, cell in zip(headings[1:], others, strict=True):
            if cell:
                paragraph(console, cell, first=f"    {heading}: " if heading else "    ", indent="      ", style=style)
