"""Running the checks: every one gets its turn, and the report is the same object for people, files and ``--json``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from simpletuner_gh200.diagnostics.check import Check, Finding, FindingStatus, all_checks, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.machine import describe
from simpletuner_gh200.errors import GH200Error, UsageError
from simpletuner_gh200.telemetry.printable import printable
from simpletuner_gh200.telemetry.redact import redact_text
from simpletuner_gh200.units import counted

SYMBOLS: dict[FindingStatus, str] = {"pass": "✅", "warn": "⚠️", "fail": "❌", "skip": "➖"}


GPU = "GH201"
"""The check that is skipped where there is no GPU."""


@dataclass(frozen=True)
class Examination:
    """The findings of one examination, in the order of their codes."""

    rows: tuple[tuple[Check, Finding], ...]
    machine: Mapping[str, Any] = field(default_factory=dict)
    """What was examined, see ``diagnostics/machine.py``."""

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(finding.status for _check, finding in self.rows)
        return {status: found.get(status, 0) for status in get_args(FindingStatus)}

    @property
    def ok(self) -> bool:
        return self.counts["fail"] == 0

    @property
    def verdict(self) -> str:
        """In a few words: may a run start?"""
        failed, warned = self.counts["fail"], self.counts["warn"]
        if failed:
            return f"not ready: {counted(failed, 'check')} failed"
        found = f"with {counted(warned, 'warning')}" if warned else ""
        if any(check.code == GPU and finding.status == "skip" for check, finding in self.rows):
            return f"nothing failed{f', {found}' if found else ''}, but no GPU is here: what needs one was not examined"
        return f"ready, {found}" if found else "ready"

    @property
    def closing_line(self) -> str:
        counts = self.counts
        warnings = counted(counts["warn"], "warning")
        return f"{counts['pass']} passed, {warnings}, {counts['fail']} failed, {counts['skip']} skipped"

    def having(self, status: FindingStatus) -> list[tuple[Check, Finding]]:
        return [(check, finding) for check, finding in self.rows if finding.status == status]

    def to_json(self) -> dict[str, Any]:
        """What scripts rely on: checks[]/{code,what,why,found,fix,status}, summary, machine."""
        checks = [
            {
                "code": check.code,
                "what": check.what,
                "why": check.why,
                "found": finding.found,
                "fix": finding.fix,
                "status": finding.status,
                "symbol": SYMBOLS[finding.status],
            }
            for check, finding in self.rows
        ]
        return {"machine": dict(self.machine), "checks": checks, "summary": {**self.counts, "ok": self.ok}}


def skipped_in_words(examination: Examination) -> str:
    """What was not examined, by its reason; empty where everything was."""
    reasons: dict[str, list[str]] = {}
    for check, finding in examination.having("skip"):
        reasons.setdefault(finding.found, []).append(check.code)
    told = "; ".join(f"{reason} ({', '.join(runs_of(codes))})" for reason, codes in reasons.items())
    return f"{examination.counts['skip']} skipped: {told}" if told else ""


def runs_of(codes: Sequence[str]) -> list[str]:
    """Codes in a row as one: ``GH211-GH217``."""
    runs: list[list[str]] = []
    for code in codes:
        if runs and int(code[2:]) == int(runs[-1][-1][2:]) + 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def examine(
    context: Context, checks: Sequence[Check] | None = None, *, before: Callable[[Check], None] | None = None
) -> Examination:
    """Run the checks; ``before`` is told which one is next."""
    rows = []
    for check in all_checks() if checks is None else checks:
        if before is not None:
            before(check)
        rows.append((check, _redacted(_run(check, context))))
    return Examination(tuple(rows), describe(context))


def write_report(examination: Examination, path: Path) -> None:
    """Leave the report in a file; a report that was there is replaced in one step."""
    waiting = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        waiting.write_text(json.dumps(examination.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        waiting.replace(path)
    except OSError as refused:
        raise UsageError(f"cannot write {path}: {refused.strerror}", remedy="name another file with --output") from None


def _run(check: Check, context: Context) -> Finding:
    """A check that can't look is a finding too: the others must still be heard."""
    try:
        return check.run(context)
    except (GH200Error, OSError, ValueError, KeyError) as broken:
        return warned(
            f"could not be examined: {type(broken).__name__}: {broken}", "look at the message; it may be a bug"
        )


def _redacted(finding: Finding) -> Finding:
    found, fix = (printable(redact_text(words), lines=True) for words in (finding.found, finding.fix))
    return Finding(finding.status, found, fix)
