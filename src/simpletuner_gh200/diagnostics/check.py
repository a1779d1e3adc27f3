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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import getdoc
from typing import Any, Literal, get_args

from simpletuner_gh200.diagnostics.context import Context, NothingToLookAt
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.units import counted

CheckStatus = Literal["pass", "warn", "fail", "skip"]
SYMBOLS: dict[str, str] = {"pass": "✅", "warn": "⚠️", "fail": "❌", "skip": "➖"}


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


class Failed(Exception):
    """What is looked at is not as it should be; another way to say ``failed``."""


@dataclass(frozen=True)
class Check:
    """``code`` never changes its meaning: scripts and documentation name it."""

    code: str
    what: str
    why: str
    run: Callable[[Any], CheckResult]

    def result(self, subject: Any, broken: Callable[[str], CheckResult]) -> CheckResult:
        """A check that can't look is a result too, that of ``broken``: the others must still be heard."""
        try:
            return self.run(subject)
        except NothingToLookAt as nothing:
            return skipped(str(nothing))
        except Failed as wrong:
            return failed(str(wrong), "")
        except (GH200Error, RuntimeError, OSError, ValueError, KeyError) as failure:
            return broken(f"{type(failure).__name__}: {failure}")


@dataclass(frozen=True)
class Results:
    """What checks found, in their order."""

    rows: tuple[tuple[Check, CheckResult], ...]

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(result.status for _check, result in self.rows)
        return {status: found.get(status, 0) for status in get_args(CheckStatus)}

    @property
    def ok(self) -> bool:
        return self.counts["fail"] == 0

    @property
    def verdict(self) -> str:
        """In a few words."""
        raise NotImplementedError

    @property
    def closing_line(self) -> str:
        counts = self.counts
        warnings = f"{counted(counts['warn'], 'warning')}, " if counts["warn"] else ""
        return f"{counts['pass']} passed, {warnings}{counts['fail']} failed, {counts['skip']} skipped"

    def having(self, status: str) -> list[tuple[Check, CheckResult]]:
        return [(check, result) for check, result in self.rows if result.status == status]

    @property
    def skipped_in_words(self) -> str:
        """What was not looked at, by its reason; empty where everything was."""
        reasons: dict[str, list[str]] = {}
        for check, result in self.having("skip"):
            reasons.setdefault(result.found, []).append(check.code)
        all_of_them = "; ".join(f"{reason} ({', '.join(codes)})" for reason, codes in reasons.items())
        return f"{self.counts['skip']} skipped: {all_of_them}" if reasons else ""


def check(code: str, what: str) -> Callable[[Look], Check]:
    """What it is for is the docstring of the decorated function, on one line."""
    return lambda look: Check(code, what, " ".join((getdoc(look) or "").split()), look)


def all_checks() -> tuple[Check, ...]:
    """Every check, ordered by code."""
    folder = importlib.import_module("simpletuner_gh200.diagnostics.checks")
    names = [f"{folder.__name__}.{found.name}" for found in pkgutil.iter_modules(folder.__path__)]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return tuple(sorted((value for value in values if isinstance(value, Check)), key=lambda check: check.code))


# -- the self-test's ---------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """The device under test."""

    driver: Driver
    ordinal: int = 0
    emulated: bool = False
    """Speed means nothing there, and kernels don't run."""

    @cached_property
    def caps(self) -> Capabilities:
        return self.driver.capabilities(self.ordinal)

    def need(self, having: bool, what: str) -> None:
        """Skip the check unless ``having``."""
        if not having:
            raise NothingToLookAt(what)

    def need_device(self) -> None:
        self.need(self.caps.mode != "none", f"no CUDA device: {self.caps.absence}")

    def need_real_device(self) -> None:
        self.need_device()
        self.need(not self.emulated, "an emulated device has no speed and no kernels")


def self_check(
    name: str, what: str, look: Callable[[Bench], str], needs: Callable[[Bench], None] = lambda _bench: None
) -> Check:
    """``name``: ``group.what``, stable: people send reports by these names. ``look`` returns what was found."""

    def run(bench: Bench) -> CheckResult:
        needs(bench)
        return passed(look(bench))

    return Check(name, what, "", run)


def expect(holds: bool, found: str) -> None:
    """A check's assertion, which stays in optimized runs."""
    if not holds:
        raise Failed(found)
