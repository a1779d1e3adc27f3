"""Which releases are supported: one data file, and the table in the documentation that is made from it.

``releases.json`` is the result of a sweep over the package index; ``tested.py`` says which releases are not only read
but run, and with what. Neither limits what is accepted: an unknown release is decided by the check, seam by seam.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.check import Verdict
from simpletuner_gh200.upstream.features import FEATURES
from simpletuner_gh200.upstream.tested import FIRST, TESTED, tested_versions

DATA = "releases.json"
BEGIN = "<!-- begin generated: gh200 upstream support --write -->"
END = "<!-- end generated -->"

EXECUTED = {each.release: f"unmodified, end to end on CPU: Python {each.pythons[0]}" for each in TESTED}
"""Releases the integration tests train with."""


@dataclass(frozen=True)
class Release:
    """A swept release: what is off there, by feature, with the reason."""

    version: str
    off: dict[str, str]


def known_releases() -> list[Release]:
    text = resources.files(__package__).joinpath(DATA).read_text(encoding="utf-8")
    return [Release(entry["version"], entry["off"]) for entry in json.loads(text)["releases"]]


def release_of(verdict: Verdict) -> Release:
    return Release(verdict.version, {name: str(status) for name, status in verdict.features.items() if not status.on})


def data_text(releases: Iterable[Release]) -> str:
    rows = [{"version": release.version, "off": release.off} for release in releases]
    return json.dumps({"releases": rows}, indent=1) + "\n"


def support_table(releases: Iterable[Release]) -> str:
    """Markdown: one row per run of releases that share a verdict, split where one is also executed."""
    lines = [
        f"| SimpleTuner | releases | checked | {' | '.join(FEATURES)} |",
        f"|---|---|---|{'---|' * len(FEATURES)}",
    ]
    notes: list[str] = []
    for executed, members in _alike(releases):
        cells = ["on" if name not in members[0].off else "**off**" for name in FEATURES]
        lines.append(f"| {_span(members)} | {len(members)} | {executed} | {' | '.join(cells)} |")
        notes.extend(f"- {_span(members)}: {name} is {reason}" for name, reason in members[0].off.items())
    return "\n".join([*lines, "", *(notes or ["No feature is off on any of these releases."]), "", *_tried_with()])


def _tried_with() -> list[str]:
    versions = {each: tested_versions(each.release) for each in TESTED}
    return [
        f"| tested | Python | {' | '.join(FIRST)} |",
        f"|---|---|{'---|' * len(FIRST)}",
        *(
            f"| {each.release} | {each.pythons[0]} | {' | '.join(pinned[name] for name in FIRST)} |"
            for each, pinned in versions.items()
        ),
    ]


def support_rows(releases: Iterable[Release]) -> list[tuple[str, str, str, str]]:
    """The same for a screen: releases, how many, how they were checked, and what is off there."""
    return [
        (
            _span(members),
            str(len(members)),
            executed,
            "; ".join(f"{name} is {reason}" for name, reason in members[0].off.items()) or f"all {len(FEATURES)} on",
        )
        for executed, members in _alike(releases)
    ]


def _alike(releases: Iterable[Release]) -> Iterator[tuple[str, list[Release]]]:
    """Runs of releases that share a verdict, with how they were checked."""
    for (executed, _off), group in groupby(
        releases, key=lambda release: (_executed(release), sorted(release.off.items()))
    ):
        yield executed, list(group)


def support_document(releases: Iterable[Release]) -> dict[str, Any]:
    """What the table says, for scripts."""
    return {
        "features": list(FEATURES),
        "releases": [
            {"version": release.version, "off": release.off, "executed": EXECUTED.get(release.version)}
            for release in releases
        ],
    }


def replace_block(page: str, table: str) -> str:
    """``page`` with the text between the two markers replaced."""
    before, begin, rest = page.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"the page has no block between {BEGIN} and {END}", remedy="put the two markers back")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def write_page(path: Path) -> bool:
    """Renew the table in ``path``; whether that changed anything."""
    page = path.read_text(encoding="utf-8")
    renewed = replace_block(page, support_table(known_releases()))
    if renewed != page:
        path.write_text(renewed, encoding="utf-8")
    return renewed != page


def write_data(verdicts: Iterable[Verdict]) -> Path:
    """Renew the data file of this installation; meant for a checkout of ours."""
    with resources.as_file(resources.files(__package__).joinpath(DATA)) as path:
        path.write_text(data_text(map(release_of, verdicts)), encoding="utf-8")
        return path


def _executed(release: Release) -> str:
    return f"source, and {EXECUTED[release.version]}" if release.version in EXECUTED else "source"


def _span(releases: list[Release]) -> str:
    first, last = releases[0].version, releases[-1].version
    return first if first == last else f"{first} to {last}"
