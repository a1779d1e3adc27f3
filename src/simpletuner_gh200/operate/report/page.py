"""From a run's folder to its report: one HTML file, no script, no network, every word from outside escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.liveness import Liveness, liveness
from simpletuner_gh200.operate.planned import compared, foreseen
from simpletuner_gh200.operate.ranks import RankTable, rank_table, read_ranks
from simpletuner_gh200.operate.report.figures import figures, time_line
from simpletuner_gh200.operate.report.findings import Finding, findings, rank_words
from simpletuner_gh200.operate.report.marks import breakable, escaped
from simpletuner_gh200.operate.report.style import STYLE, colour
from simpletuner_gh200.operate.report.summary import summary
from simpletuner_gh200.operate.run_folder import output_of, run_name, telemetry_of
from simpletuner_gh200.telemetry.reading import Recorded, read_run
from simpletuner_gh200.telemetry.redact import redact
from simpletuner_gh200.units import counted, format_bytes, format_seconds

DOCTOR_FILES = ("doctor.json", "gh200_diagnostic_report.json")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Even if something slipped through, the browser would neither run nor fetch it."""

_SHADES = {"bad": colour(1), "warn": colour(4), "note": colour(5)}


def build(run: Path, *, doctor: Path | None = None, elsewhere: Sequence[Path] = ()) -> str:
    """The report of ``run``, an output or project folder. ``elsewhere``: output folders of other nodes of the run.

    A doctor's report is shown if it is named, or lies beside the run's own records; one that lies where the command is
    given may be of any project.
    """
    recorded = read_run(telemetry_of(run))
    ranks = read_ranks(recorded, [output_of(path) for path in elsewhere])
    found = _doctor_report(doctor, beside=recorded.path.parent)
    return page(
        recorded,
        title=f"Run {run_name(recorded.path)}",
        doctor=found,
        ranks=ranks,
        alive=liveness(recorded),
    )


def write(content: str, path: Path) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as refused:
        raise UsageError(f"cannot write {path}: {refused.strerror}", remedy="name another file with -o") from None


def page(
    run: Recorded,
    *,
    title: str,
    doctor: Mapping[str, Any] | None = None,
    ranks: Sequence[Recorded] = (),
    alive: Liveness | None = None,
) -> str:
    """The whole report as text: what matters first is open, long tables are folded."""
    shown = _without_secrets(run)
    others = [_without_secrets(rank) for rank in ranks if rank.rank != run.rank]
    table = rank_table(ranks)
    parts = [
        f"<h1>{escaped(title)}</h1>",
        _findings(findings(shown, table, alive, others)),
        _definitions(summary(shown, alive)),
        _open("Where the time went", time_line(shown)),
        _plots(shown, ranks),
        _open("Planned against measured", _table(("what", "planned", "measured", ""), compared(shown))),
        _open("Ranks", _ranks(table)),
        _open("Settings that differ from the defaults", _settings(shown, default=False)),
        _folded("Settings at their defaults", _settings(shown, default=True)),
        _folded("Features", _table(("feature", "state"), _pairs(shown.start.get("features")))),
        _folded("Doctor", _doctor(doctor)),
        _folded("Seams", _table(("seam", "state"), _pairs(shown.start.get("seams")))),
        _folded("Versions", _table(("package", "version"), _pairs(shown.start.get("versions")))),
        _folded("Time by phase", _table(("phase", "seconds"), _seconds(shown))),
        _folded("Training configuration", _configuration(shown)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _without_secrets(run: Recorded) -> Recorded:
    return Recorded(run.path, redact(run.start), redact(run.end), run.steps, run.unreadable)


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return "<p>Nothing was found wrong with this run.</p>"
    items = (f'<li class="{_SHADES[finding.weight]}">{breakable(finding.text)}</li>' for finding in found)
    return f'<ul class="findings">{"".join(items)}</ul>'


def _plots(run: Recorded, ranks: Sequence[Recorded]) -> str:
    drawn = figures(run, foreseen(run), ranks)
    if not drawn:
        return "<p>No step was recorded.</p>"
    return (
        '<div class="plots">'
        + "".join(
            f"<figure><h2>{escaped(figure.title)}</h2>{figure.svg}<figcaption>{escaped(figure.caption)}</figcaption></figure>"
            for figure in drawn
        )
        + "</div>"
    )


def _ranks(table: RankTable | None) -> str:
    if table is None:
        return ""
    rows = [
        (
            str(row.rank),
            row.node,
            format_seconds(row.step),
            format_seconds(row.data_wait),
            format_seconds(row.compute),
            f"{row.held_up} of {table.steps}",
            format_bytes(row.resident) if row.resident is not None else "",
        )
        for row in table.rows
    ]
    headings = ("rank", "node", "median step", "data wait", "compute", "waited longest", "most memory")
    words = rank_words(table)
    over = f"{counted(len(table.rows), 'rank')} on {counted(len(table.nodes), 'node')}"
    return f"<p>{escaped(over)}: {escaped(words)}.</p>{_table(headings, rows)}"


def _settings(run: Recorded, *, default: bool) -> str:
    rows = [
        (key, _word(entry.get("value")), str(entry.get("origin")))
        for key, entry in _mapping(run.start.get("settings"))
        if isinstance(entry, Mapping) and (entry.get("origin") == "default") is default
    ]
    return _table(("key", "value", "from"), rows)


def _configuration(run: Recorded) -> str:
    return _table(
        ("option", "value"), [(key, _word(value)) for key, value in sorted(_mapping(run.start.get("training")))]
    )


def _doctor(report: Mapping[str, Any] | None) -> str:
    if not report:
        return "<p>None of this run: <code>gh200 doctor -o FILE</code> makes one for <code>--doctor FILE</code>.</p>"
    checks = redact(report).get("checks")
    rows = [
        (
            str(check.get("status")),
            f"{check.get('code')} {check.get('what')}",
            str(check.get("found")) + (f" — fix: {check['fix']}" if check.get("fix") else ""),
        )
        for check in (checks if isinstance(checks, list) else ())
        if isinstance(check, Mapping)
    ]
    order = ("fail", "warn", "pass", "skip")
    rows.sort(key=lambda row: order.index(row[0]) if row[0] in order else len(order))
    return _table(("status", "check", "found"), rows)


def _seconds(run: Recorded) -> list[tuple[str, str]]:
    return [
        (name, f"{value:.1f}") for name, value in _mapping(run.end.get("seconds")) if isinstance(value, int | float)
    ]


def _open(title: str, content: str) -> str:
    return f"<section><h2>{escaped(title)}</h2>{content}</section>" if content else ""


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>{content}</details>" if content else ""


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<div><dt>{escaped(a)}</dt><dd>{escaped(b)}</dd></div>" for a, b in rows) + "</dl>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escaped(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{breakable(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _pairs(value: object) -> list[tuple[str, str]]:
    return [(str(key), _word(item)) for key, item in _mapping(value)]


def _mapping(value: object) -> list[tuple[str, Any]]:
    return [(str(key), item) for key, item in value.items()] if isinstance(value, Mapping) else []


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _doctor_report(explicit: Path | None, *, beside: Path) -> Mapping[str, Any] | None:
    candidates = [explicit] if explicit else [beside / name for name in DOCTOR_FILES]
    for path in candidates:
        if path.is_file():
            return _read_doctor(path)
    if explicit is not None:
        raise UsageError(f"--doctor {explicit}: no such file", remedy="make one with gh200 doctor --output FILE")
    return None


def _read_doctor(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise UsageError(f"{path} is no doctor's report: {broken}", remedy="gh200 doctor makes one") from None
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} is no doctor's report", remedy="gh200 doctor makes one")
    return content
