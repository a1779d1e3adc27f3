"""The page: one HTML file, no script, no network, every word from outside escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from simpletuner_gh200.operate.report.figures import figures
from simpletuner_gh200.operate.report.style import STYLE
from simpletuner_gh200.operate.report.summary import summary
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.telemetry.redact import redact

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Even if something slipped through, the browser would neither run nor fetch it."""


def page(run: Recorded, *, title: str, doctor: Mapping[str, Any] | None = None) -> str:
    """The whole report as text."""
    shown = Recorded(run.path, redact(run.start), redact(run.end), run.steps, run.unreadable)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _definitions(summary(shown)),
        _plots(shown),
        _section("Settings", _settings(shown)),
        _section("Features", _table(("feature", "state"), _pairs(shown.start.get("features")))),
        _section("Doctor", _doctor(doctor)),
        _section("Seams", _table(("seam", "state"), _pairs(shown.start.get("seams")))),
        _section("Versions", _table(("package", "version"), _pairs(shown.start.get("versions")))),
        _section("Time by phase", _table(("phase", "seconds"), _seconds(shown))),
        _section("Training configuration", _configuration(shown)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _plots(run: Recorded) -> str:
    drawn = figures(run)
    if not drawn:
        return "<p>No step was recorded.</p>"
    return (
        '<div class="plots">'
        + "".join(
            f"<figure><h2>{escape(figure.title)}</h2>{figure.svg}<figcaption>{escape(figure.caption)}</figcaption></figure>"
            for figure in drawn
        )
        + "</div>"
    )


def _settings(run: Recorded) -> str:
    rows = [
        (key, _word(entry.get("value")), str(entry.get("origin")))
        for key, entry in _mapping(run.start.get("settings"))
        if isinstance(entry, Mapping)
    ]
    return _table(("key", "value", "from"), rows)


def _configuration(run: Recorded) -> str:
    return _table(
        ("option", "value"), [(key, _word(value)) for key, value in sorted(_mapping(run.start.get("training")))]
    )


def _doctor(report: Mapping[str, Any] | None) -> str:
    if not report:
        return "<p>No doctor's report was found. <code>gh200 doctor CONFIG</code> makes one.</p>"
    rows = [
        (
            str(check.get("status")),
            f"{check.get('code')} {check.get('what')}",
            str(check.get("found")) + (f" — fix: {check['fix']}" if check.get("fix") else ""),
        )
        for check in redact(report).get("checks", [])
        if isinstance(check, Mapping)
    ]
    return _table(("status", "check", "found"), rows)


def _seconds(run: Recorded) -> list[tuple[str, str]]:
    return [
        (name, f"{value:.1f}") for name, value in _mapping(run.end.get("seconds")) if isinstance(value, int | float)
    ]


def _section(title: str, content: str) -> str:
    return f"<details open><summary>{escape(title)}</summary>{content}</details>" if content else ""


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in rows) + "</dl>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _pairs(value: object) -> list[tuple[str, str]]:
    return [(str(key), _word(item)) for key, item in _mapping(value)]


def _mapping(value: object) -> list[tuple[str, Any]]:
    return [(str(key), item) for key, item in value.items()] if isinstance(value, Mapping) else []


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
