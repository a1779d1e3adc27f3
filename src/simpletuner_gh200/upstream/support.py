"""Which releases are supported: the sweep, the file it leaves, and the table in the documentation that is made from it.

``releases.json`` is the result of a sweep over the package index; ``tested.py`` says which releases are not only read
but run, and with what. Neither limits what is accepted: an unknown release is decided by the check, seam by seam.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.check import Verdict, check_remembered
from simpletuner_gh200.upstream.features import FEATURES
from simpletuner_gh200.upstream.source import released, releases
from simpletuner_gh200.upstream.tested import FIRST, TESTED, tested_versions

DATA = "releases.json"
BEGIN = "<!-- begin generated: gh200 upstream support --write -->"
END = "<!-- end generated -->"

EXECUTED = {each.release: f"unmodified, end to end on CPU: Python {each.pythons[0]}" for each in TESTED}
"""Releases the integration tests train with."""

Releases = Mapping[str, Mapping[str, str]]
"""Swept releases, oldest first, and what is off on each, by feature, with the reason."""


def sweep() -> Iterator[Verdict]:
    """One verdict after the other, oldest release first."""
    return (check_remembered(released(version)) for version in releases())


def known_releases() -> Releases:
    text = resources.files(__package__).joinpath(DATA).read_text(encoding="utf-8")
    return {entry["version"]: entry["off"] for entry in json.loads(text)["releases"]}


def off_on(verdict: Verdict) -> dict[str, str]:
    return {name: str(status) for name, status in verdict.features.items() if not status.on}


def support_rows(releases: Releases) -> list[tuple[str, str, str, str]]:
    """(first to last, how many, how they were checked, what is off) for each run of releases that share a verdict."""
    rows = []
    for _same, group in groupby(releases, key=lambda name: (EXECUTED.get(name), sorted(releases[name].items()))):
        members = list(group)
        first, last = members[0], members[-1]
        checked = f"source, and {EXECUTED[first]}" if first in EXECUTED else "source"
        off = "; ".join(f"{name} is {reason}" for name, reason in releases[first].items())
        span = first if first == last else f"{first} to {last}"
        rows.append((span, str(len(members)), checked, off or f"all {len(FEATURES)} on"))
    return rows


def support_table(releases: Releases) -> str:
    """Markdown: the same rows, and the versions that the executed ones are tested with."""
    tested = [(each.release, each.pythons[0], *map(tested_versions(each.release).get, FIRST)) for each in TESTED]
    tables = (
        (("SimpleTuner", "releases", "checked", "features"), *support_rows(releases)),
        (("tested", "Python", *FIRST), *tested),
    )
    return "\n\n".join("\n".join(_table(rows)) for rows in tables)


def _table(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield f"| {' | '.join(map(str, row))} |"
        if number == 0:
            yield f"|{'---|' * len(row)}"


def support_document(releases: Releases) -> dict[str, Any]:
    """What the table says, for scripts."""
    return {
        "features": list(FEATURES),
        "releases": [
            {"version": version, "off": off, "executed": EXECUTED.get(version)} for version, off in releases.items()
        ],
    }


def write_page(path: Path) -> bool:
    """Renew the table between the two markers in ``path``; whether that changed anything."""
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"{path} has no block between {BEGIN} and {END}", remedy="put the two markers back")
    renewed = f"{before}{BEGIN}\n{support_table(known_releases())}\n{END}{after}"
    if renewed != page:
        path.write_text(renewed, encoding="utf-8")
    return renewed != page


def write_data(verdicts: Iterable[Verdict]) -> None:
    """Renew the data file of this installation; meant for a checkout of ours."""
    rows = [{"version": verdict.version, "off": off_on(verdict)} for verdict in verdicts]
    with resources.as_file(resources.files(__package__).joinpath(DATA)) as path:
        path.write_text(json.dumps({"releases": rows}, indent=1) + "\n", encoding="utf-8")
