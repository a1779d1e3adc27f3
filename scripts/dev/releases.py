#!/usr/bin/env python3
"""Which releases are supported: ``releases.json`` is what a sweep of the index found, and docs/support.md shows it.

Run it for a sweep. Neither limits what is accepted: an unknown release is decided by the check, seam by seam.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from simpletuner_gh200.upstream.check import Verdict, check_remembered
from simpletuner_gh200.upstream.features import FEATURES
from simpletuner_gh200.upstream.source import released, releases
from simpletuner_gh200.upstream.tested import FIRST, TESTED, tested_versions

DATA = Path(__file__).with_name("releases.json")
BEGIN, END = "<!-- begin generated: make docs -->\n", "<!-- end generated -->"

EXECUTED = {each.release: f"unmodified, end to end on CPU: Python {each.pythons[0]}" for each in TESTED}
"""Releases the integration tests train with."""


def known_releases() -> Mapping[str, Mapping[str, str]]:
    """Swept releases, oldest first, and what is off on each, by feature, with the reason."""
    found: Mapping[str, Mapping[str, str]] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def off_on(verdict: Verdict) -> dict[str, str]:
    return {name: str(status) for name, status in verdict.features.items() if not status.on}


def page(old: str) -> str:
    """docs/support.md with the table as it is now."""
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    table = "".join(f"{line}\n" for line in _tables())
    return f"{before}{BEGIN}{table}{END}{after}"


def _tables() -> Iterator[str]:
    yield from _table([("SimpleTuner", "releases", "checked", "features"), *_rows(known_releases())])
    yield ""
    tested = [(each.release, each.pythons[0], *map(tested_versions(each.release).get, FIRST)) for each in TESTED]
    yield from _table([("tested", "Python", *FIRST), *tested])


def _rows(known: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[object, ...]]:
    """(first to last, how many, how they were checked, what is off) for each run of releases that share a verdict."""
    for _same, group in groupby(known, key=lambda name: (EXECUTED.get(name), sorted(known[name].items()))):
        first, *others = group
        span = f"{first} to {others[-1]}" if others else first
        checked = f"source, and {EXECUTED[first]}" if first in EXECUTED else "source"
        off = "; ".join(f"{name} is {reason}" for name, reason in known[first].items())
        yield span, 1 + len(others), checked, off or f"all {len(FEATURES)} on"


def _table(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    yield from (lines[0], f"|{'---|' * len(rows[0])}", *lines[1:])


if __name__ == "__main__":
    swept = {str(release): off_on(check_remembered(released(release))) for release in releases()}
    DATA.write_text(json.dumps(swept, indent=1) + "\n", encoding="utf-8")
