"""A doctor's check: a stable code, what it looks at, why that matters, and what it finds.

    @check("GH304", "page size")
    def page_size(context: Context) -> CheckResult:
        \"\"\"Why it matters: the docstring is what `gh200 doctor -v` and the page of codes say.\"\"\"

Checks stand in ``diagnostics/checks``, a file per family of codes. A check looks at the machine only through its
``Context``, so that it can be shown another one; what the context has not to show skips the check.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc
from typing import Any, Literal

from simpletuner_gh200.diagnostics.context import Context

CheckStatus = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """What one check found. ``fix`` is one thing to do about it, empty where nothing needs doing."""

    status: CheckStatus
    found: str
    fix: str = ""


def passed(found: str) -> CheckResult:
    return CheckResult("pass", found)


def warned(found: str, fix: str) -> CheckResult:
    return CheckResult("warn", found, fix)


def failed(found: str, fix: str) -> CheckResult:
    return CheckResult("fail", found, fix)


def skipped(found: str) -> CheckResult:
    return CheckResult("skip", found)


Look = Callable[[Context], CheckResult]


@dataclass(frozen=True)
class Check:
    """``code`` never changes its meaning: scripts and documentation name it."""

    code: str
    what: str
    why: str
    run: Look


def check(code: str, what: str) -> Callable[[Look], Check]:
    return lambda look: Check(code, what, docstring(look), look)


def docstring(function: Callable[..., Any]) -> str:
    """On one line."""
    return " ".join((getdoc(function) or "").split())


def all_checks() -> tuple[Check, ...]:
    """Every check, ordered by code."""
    folder = importlib.import_module("simpletuner_gh200.diagnostics.checks")
    names = [f"{folder.__name__}.{found.name}" for found in pkgutil.iter_modules(folder.__path__)]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return tuple(sorted((value for value in values if isinstance(value, Check)), key=lambda check: check.code))
