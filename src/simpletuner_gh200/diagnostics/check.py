"""A doctor's check: a stable code, what it looks at, why that matters, and what it finds.

Checks stand in ``diagnostics/checks``, a file per family of codes, each file exporting ``CHECKS``. A check looks at the
machine only through its ``Context``, so that it can be shown another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from simpletuner_gh200.registry import contributions

if TYPE_CHECKING:
    from simpletuner_gh200.diagnostics.context import Context

FindingStatus = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """What one check found. ``fix`` is one thing to do about it, empty where nothing needs doing."""

    status: FindingStatus
    found: str
    fix: str = ""


def passed(found: str) -> Finding:
    return Finding("pass", found)


def warned(found: str, fix: str) -> Finding:
    return Finding("warn", found, fix)


def failed(found: str, fix: str) -> Finding:
    return Finding("fail", found, fix)


def skipped(found: str) -> Finding:
    return Finding("skip", found)


@dataclass(frozen=True)
class Check:
    """``code`` never changes its meaning: scripts and documentation name it."""

    code: str
    what: str
    why: str
    run: Callable[[Context], Finding]


def all_checks() -> tuple[Check, ...]:
    """Every check, ordered by code."""
    found = contributions("simpletuner_gh200.diagnostics.checks", "CHECKS", Check)
    return tuple(sorted(found, key=lambda check: check.code))
