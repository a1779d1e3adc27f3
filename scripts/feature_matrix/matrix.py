"""The matrix: one row per test, three outcomes, an exit code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Row:
    """``detail`` says what was seen, what went wrong, or why it can't be tried here."""

    test: str
    scenario: str
    command: str
    outcome: str
    detail: str


class Skip(Exception):
    """This can't be tried here; the text says why."""


def attempt(test: str, scenario: str, command: str, try_it: Callable[[], str]) -> Row:
    """Run ``try_it``, which returns what it saw, or raises."""
    try:
        return Row(test, scenario, command, PASSED, try_it())
    except Skip as reason:
        return Row(test, scenario, command, SKIPPED, str(reason))
    except AssertionError as wrong:
        return Row(test, scenario, command, FAILED, str(wrong))
    except Exception as broken:  # noqa: BLE001 - whatever breaks in a test is that test's failure, not the matrix's
        return Row(test, scenario, command, FAILED, f"{type(broken).__name__}: {broken}".replace("\n", " "))


def show(rows: Iterable[Row], notes: Iterable[str], *, as_json: bool) -> int:
    """Print the matrix; 1 if anything failed."""
    rows, notes = list(rows), list(notes)
    counts = Counter(row.outcome for row in rows)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "notes": notes, **counts}))
    else:
        for line in table(rows):
            print(line)
        for note in notes:
            print(f"note: {note}")
        print(f"{counts[PASSED]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped")
    return 1 if counts[FAILED] else 0


def table(rows: list[Row]) -> list[str]:
    """Markdown, as the guides keep it: test id, scenario, command, outcome."""
    cells = [("Test ID", "Scenario", "Command", "Outcome")]
    cells += [(row.test, row.scenario, f"`{row.command}`", f"{row.outcome}: {row.detail}") for row in rows]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    lines = []
    for *padded, outcome in cells:
        texts = (text.ljust(width) for text, width in zip(padded, widths, strict=True))
        lines.append(f"| {' | '.join(texts)} | {outcome} |")
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|---|", *lines[1:]]
