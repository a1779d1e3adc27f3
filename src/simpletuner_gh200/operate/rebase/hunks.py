"""A fork's edit of one upstream file, hunk by hunk: what our seams stand for, and what is someone's own work.

A hunk is called replaced only where three things agree: it speaks of what the earlier system was about, it lies in a
place that a seam of ours wraps (or imports that system), and it takes nothing of upstream's away. Everything else is
for a person: calling someone's work replaced would drop it, looking at a hunk too many costs a minute.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

SUBJECT = re.compile(r"gh200|uvm|unified_memory|in_memory|effective_batch|ramp_?up|cache_config", re.IGNORECASE)
HEADER = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
MODULE = "module level"
SHOWN = 3
"""Lines of a hunk that the checklist quotes."""


@dataclass(frozen=True)
class Change:
    """One hunk as git prints it without context: first line in the old and the new file, and the lines."""

    old_line: int
    new_line: int
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Hunk:
    """``replaced_by``: the seams that stand for it; empty: it has to be looked at by hand."""

    line: int
    where: str
    """The function it lies in, or ``module level``."""
    added: int
    removed: int
    replaced_by: tuple[str, ...]
    shown: tuple[str, ...]


def parse(diff: str) -> Iterator[Change]:
    """The hunks of ``git diff --unified=0`` of one file."""
    header: re.Match[str] | None = None
    removed: list[str] = []
    added: list[str] = []
    for line in [*diff.splitlines(), "@@"]:
        if line.startswith("@@"):
            if header is not None:
                yield Change(int(header[1]), int(header[3]), tuple(removed), tuple(added))
            header, removed, added = HEADER.match(line), [], []
        elif header is not None and line.startswith("-"):
            removed.append(line[1:])
        elif header is not None and line.startswith("+"):
            added.append(line[1:])


def judge(changes: Iterator[Change], old: bytes, new: bytes, seams: dict[str, str]) -> tuple[Hunk, ...]:
    """``seams``: the qualified names that our seams wrap in this file, with each seam's name."""
    old_places, new_places = _functions(old), _functions(new)
    judged = []
    for change in changes:
        where = _place(new_places, change.new_line) if change.added else _place(old_places, change.old_line)
        shown = tuple(line.strip() for line in change.added or change.removed if line.strip())[:SHOWN]
        line = change.new_line if change.added else change.old_line
        sizes = len(change.added), len(change.removed)
        judged.append(Hunk(line, where, *sizes, _stand_in(change, where, seams), shown))
    return tuple(judged)


def _stand_in(change: Change, where: str, seams: dict[str, str]) -> tuple[str, ...]:
    added = [line for line in change.added if line.strip()]
    about = [line for line in added if SUBJECT.search(line)]
    takes_away = any(line.strip() and not SUBJECT.search(line) for line in change.removed)
    if takes_away or not about or 2 * len(about) < len(added):
        return ()
    if where == MODULE:
        imports = all(line.lstrip().startswith(("import ", "from ")) for line in about)
        return tuple(sorted(set(seams.values()))) if imports and len(about) == len(added) else ()
    return (seams[where],) if where in seams else ()


def _functions(text: bytes) -> list[tuple[int, int, str]]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found = []
    for node in tree.body:
        parts = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for part in parts:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([part.lineno, *(decorator.lineno for decorator in part.decorator_list)])
                found.append((first, part.end_lineno or part.lineno, prefix + part.name))
    return found


def _place(functions: list[tuple[int, int, str]], line: int) -> str:
    return next((name for first, last, name in functions if first <= line <= last), MODULE)
