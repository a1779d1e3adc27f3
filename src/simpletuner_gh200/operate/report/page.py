"""From a run's folder to its report: what a reader should know first, numbers, pictures, and long tables folded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from simpletuner_gh200.draw import page as html
from simpletuner_gh200.draw.page import breakable, escaped, section, table
from simpletuner_gh200.draw.style import colour
from simpletuner_gh200.operate.planned import compared, foreseen
from simpletuner_gh200.operate.report.figures import figures, time_line
from simpletuner_gh200.operate.run_folder import output_of, run_name, telemetry_of
from simpletuner_gh200.telemetry.ranks import RankTable
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.telemetry.redact import redact
from simpletuner_gh200.telemetry.view import RunView
from simpletuner_gh200.units import counted, format_bytes, format_seconds

IMBALANCE = 0.05
"""Share of the time lost to unequal waits that is worth a line."""


def build(run: Path, *, other_nodes: Sequence[Path] = ()) -> str:
    """The report of ``run``, an output or project folder. ``other_nodes``: output folders of other nodes of the run."""
    view = RunView.read(telemetry_of(run), [output_of(path) for path in other_nodes])
    return page(view, title=f"Run {run_name(view.run.path)}")


def page(view: RunView, *, title: str) -> str:
    """The whole report as text, without the secrets that records of others may hold."""
    view = RunView(_without_secrets(view.run), [_without_secrets(other) for other in view.others])
    run = view.run
    return html.page(
        title,
        [
            _findings(view),
            html.definitions(summary(view)),
            section("Where the time went", time_line(run)),
            _plots(view),
            section("Planned against measured", table(("what", "planned", "measured", ""), compared(run))),
            section("Ranks", _ranks(view.ranks())),
            section("Settings that differ from the defaults", _settings(run, default=False)),
            section("Settings at their defaults", _settings(run, default=True), folded=True),
            section("Features", _pairs(("feature", "state"), run.start.get("features")), folded=True),
            section("Seams", _pairs(("seam", "state"), run.start.get("seams")), folded=True),
            section("Versions", _pairs(("package", "version"), run.start.get("versions")), folded=True),
            section("Time by phase", _pairs(("phase", "seconds"), run.end.get("seconds")), folded=True),
            section("Training configuration", _pairs(("option", "value"), run.start.get("training")), folded=True),
        ],
    )


def _without_secrets(run: Recorded) -> Recorded:
    return Recorded(run.path, redact(run.start), redact(run.end), run.steps, run.unreadable, redact(run.caching))


def summary(view: RunView) -> list[tuple[str, str]]:
    """(what, value): how far the run is or how it ended, and the numbers that stand for all of it."""
    last = view.run.steps[-1] if view.run.steps else {}
    features = last.get("features")
    chosen = features.get("activations") if isinstance(features, dict) else None
    words = chosen.get("chosen") if isinstance(chosen, dict) else None
    return [*view.progress(), *view.whole(), *([("activations", words)] if isinstance(words, str) else [])]


# -- what a reader should know first ---------------------------------------------------------------------------


class Finding(NamedTuple):
    weight: Literal["bad", "warn", "note"]
    text: str


_SHADES = {"bad": colour(1), "warn": colour(4), "note": colour(5)}


def findings(view: RunView) -> list[Finding]:
    """The worst first; those of the run's own records, whatever else lies in the folder it is looked at from.

    Alerts are those of when the last step was recorded: a report is read long after.
    """
    run, last = view.run, view.run.last("time")
    alerts = (Finding("bad" if one.level == "alarm" else "warn", one.text) for one in view.alerts(at=last or 0.0))
    found = [*_endings(run, view.others), *_lost_features(run), *alerts, *_unequal(view.ranks()), *_lost_records(run)]
    return sorted(found, key=lambda finding: ("bad", "warn", "note").index(finding.weight))


def _endings(run: Recorded, others: Sequence[Recorded]) -> Iterator[Finding]:
    """A rank that fails takes the others with it, and those can only say that they were ended."""
    known = set()
    if run.end:
        known.add(str(run.end.get("reason") or _ended(run)))
        if run.end.get("status") != "completed":
            yield Finding("warn" if run.end.get("status") == "interrupted" else "bad", _ended(run))
    for other in others:
        cause = str(other.end.get("reason") or _ended(other))
        if not other.end or other.end.get("status") in ("completed", "interrupted") or cause in known:
            continue
        known.add(cause)
        where = f" on {other.start['host']}" if other.start.get("host") else ""
        yield Finding("bad", f"rank {other.rank}{where}: {_ended(other)}")


def _ended(run: Recorded) -> str:
    status = run.end.get("status")
    # "training" is what a process was doing when it was made to close its records.
    how = "ended midway" if status in (None, "training") else status
    return f"training {how}" + (f": {run.end['reason']}" if run.end.get("reason") else "")


def _lost_features(run: Recorded) -> Iterator[Finding]:
    for name, status in _items(run.start.get("features")):
        if isinstance(status, str) and status.startswith("off") and status != "off: not asked for":
            yield Finding("warn", f"{name} is {status}")


def _unequal(ranks: RankTable | None) -> Iterator[Finding]:
    if ranks is not None and (ranks.imbalance > IMBALANCE or ranks.missing):
        yield Finding("warn" if ranks.imbalance > IMBALANCE else "note", ranks.words)


def _lost_records(run: Recorded) -> Iterator[Finding]:
    if run.unreadable:
        yield Finding("note", f"{counted(run.unreadable, 'record')} could not be read: torn by a full disk or a kill")
    dropped = run.end.get("dropped")
    if isinstance(dropped, int) and dropped > 0:
        yield Finding("note", f"{counted(dropped, 'record')} could not be written")


# -- parts of the page -----------------------------------------------------------------------------------------


def _findings(view: RunView) -> str:
    items = [f'<li class="{_SHADES[finding.weight]}">{breakable(finding.text)}</li>' for finding in findings(view)]
    return f'<ul class="findings">{"".join(items)}</ul>' if items else "<p>Nothing was found wrong with this run.</p>"


def _plots(view: RunView) -> str:
    drawn = [
        f"<figure><h2>{escaped(figure.title)}</h2>{figure.picture.on_page()}"
        f"<figcaption>{escaped(figure.caption)}</figcaption></figure>"
        for figure in figures(view, foreseen(view.run))
    ]
    return f'<div class="plots">{"".join(drawn)}</div>' if drawn else "<p>No step was recorded.</p>"


def _ranks(ranks: RankTable | None) -> str:
    if ranks is None:
        return ""
    rows = [
        (
            str(row.rank),
            row.node,
            format_seconds(row.step),
            format_seconds(row.data_wait),
            format_seconds(row.compute),
            f"{row.held_up} of {ranks.steps}",
            format_bytes(row.resident) if row.resident is not None else "",
        )
        for row in ranks.rows
    ]
    headings = ("rank", "node", "median step", "data wait", "compute", "waited longest", "most memory")
    return f"<p>{escaped(ranks.size)}: {escaped(ranks.words)}.</p>{table(headings, rows)}"


def _settings(run: Recorded, *, default: bool) -> str:
    rows = [
        (key, _word(entry.get("value")), str(entry.get("origin")))
        for key, entry in _items(run.start.get("settings"))
        if isinstance(entry, Mapping) and (entry.get("origin") == "default") is default
    ]
    return table(("key", "value", "from"), rows)


def _pairs(headings: tuple[str, str], value: object) -> str:
    return table(headings, [(key, _word(item)) for key, item in _items(value)])


def _items(value: object) -> list[tuple[str, Any]]:
    return [(str(key), item) for key, item in value.items()] if isinstance(value, Mapping) else []


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
