"""What the checks of the doctor and of the self-test found, for people: the verdict, what is wrong, the rest."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from simpletuner_gh200.cli.tables import paragraph
from simpletuner_gh200.diagnostics.check import SYMBOLS, Check, Results

INDENT = " " * 10


def show_results(console: Console, command: str, found: Results, *, report: Path, verbose: bool = False) -> None:
    """``verbose``: with the reason for every check, and those that were skipped one by one."""
    paragraph(console, f"{command}: {found.verdict}", style="bold green" if found.ok else "bold red")
    paragraph(console, f"{found.closing_line}; report in {report}")
    for status in ("fail", "warn"):
        for check, result in found.having(status):
            console.print()
            paragraph(console, check.what, first=_first(status, check, console), indent=INDENT, style="bold")
            for name, words, style in (
                ("found", result.found, ""),
                ("fix", result.fix, "bold"),
                ("why", check.why, "dim"),
            ):
                if words:
                    paragraph(console, words, first=f"   {name + ':':<7}", indent=INDENT, style=style)
    console.print()
    for status in ("pass", "skip") if verbose else ("pass",):
        for check, result in found.having(status):
            paragraph(console, f"{check.what}: {result.found}", first=_first(status, check, console), indent=INDENT)
            if verbose:
                paragraph(console, check.why, first=INDENT, indent=INDENT, style="dim")
    if found.skipped_in_words and not verbose:
        paragraph(console, found.skipped_in_words, first=f"{_symbol('skip', console)} ", indent=INDENT)


def _first(status: str, check: Check, console: Console) -> str:
    return f"{_symbol(status, console)} {check.code} "


def _symbol(status: str, console: Console) -> str:
    """A picture where the screen can show one, else the word."""
    return status if console.options.ascii_only else SYMBOLS[status]
