"""From a run's folder to its report: one HTML file, no script, no network, every word from outside escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.planned import compared
from simpletuner_gh200.operate.report.figures import figures
from simpletuner_gh200.operate.report.marks import escaped
from simpletuner_gh200.operate.report.summary import summary
from simpletuner_gh200.telemetry.reading import Recorded, read_run
from simpletuner_gh200.telemetry.redact import redact

DOCTOR_FILE = "gh200_diagnostic_report.json"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Even if something slipped through, the browser would neither run nor fetch it."""


def build(run: Path, *, doctor: Path | None = None) -> str:
    """The report of ``run``. Without ``doctor``, a report of his beside the run or here is taken."""
    recorded = read_run(run)
    found = _doctor_report(doctor, beside=recorded.path.parent)
    return page(recorded, title=f"Run {_run_name(recorded.path.absolute().parent)}", doctor=found)


def _run_name(folder: Path) -> str:
    """Of the run's output folder, with its parent where it is just called output."""
    run = folder.parent if folder.name == "gh200" else folder
    return f"{run.parent.name}/{run.name}" if run.name == "output" else run.name


def write(content: str, path: Path) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as refused:
        raise UsageError(f"cannot write {path}: {refused.strerror}", remedy="name another file with -o") from None


def page(run: Recorded, *, title: str, doctor: Mapping[str, Any] | None = None) -> str:
    """The whole report as text."""
    shown = Recorded(run.path, redact(run.start), redact(run.end), run.steps, run.unreadable)
    parts = [
        f"<h1>{escaped(title)}</h1>",
        _definitions(summary(shown)),
        _plots(shown),
        _section("Planned against measured", _table(("what", "planned", "measured", ""), compared(shown))),
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
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _plots(run: Recorded) -> str:
    drawn = figures(run)
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
    return f"<details open><summary>{escaped(title)}</summary>{content}</details>" if content else ""


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<div><dt>{escaped(a)}</dt><dd>{escaped(b)}</dd></div>" for a, b in rows) + "</dl>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escaped(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _pairs(value: object) -> list[tuple[str, str]]:
    return [(str(key), _word(item)) for key, item in _mapping(value)]


def _mapping(value: object) -> list[tuple[str, Any]]:
    return [(str(key), item) for key, item in value.items()] if isinstance(value, Mapping) else []


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _doctor_report(explicit: Path | None, *, beside: Path) -> Mapping[str, Any] | None:
    candidates = [explicit] if explicit else [beside / "doctor.json", beside / DOCTOR_FILE, Path(DOCTOR_FILE)]
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


STYLE = """
:root{color-scheme:light dark;--ink:#1a1d21;--soft:#667;--line:#d8dbe0;--paper:#fff;--card:#f6f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa;--line:#3a3f46;--paper:#15181c;--card:#1d2126}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.45 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:1rem}
h1{font-size:1.4rem;overflow-wrap:anywhere}
h2{font-size:1rem;margin:0 0 .4rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.6rem;margin:0 0 1rem}
dl div{background:var(--card);padding:.6rem;border-radius:.4rem}
dt{color:var(--soft);font-size:.8rem}
dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0;background:var(--card);padding:.8rem;border-radius:.4rem;break-inside:avoid}
figcaption{color:var(--soft);font-size:.8rem}
svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
@media(max-width:500px){svg text{font-size:17px}}
.grid{stroke:var(--line);stroke-width:1}
.legend{list-style:none;margin:.3rem 0;padding:0;display:flex;flex-wrap:wrap;gap:.2rem .9rem;font-size:.8rem}
.legend li{overflow-wrap:anywhere}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
details{margin:1rem 0}
summary{font-weight:600;cursor:pointer}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.85rem}
td,th{border-bottom:1px solid var(--line);padding:.3rem .5rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}
@media print{body{background:#fff;color:#000}figure,dl div{background:none;border:1px solid #ccc}main{max-width:none}}
"""
"""The page's only style sheet: narrow screens, dark screens, paper."""
