"""A plan as a picture: bars per pool and phase, for a terminal, as SVG, and on a page with the table beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from simpletuner_gh200.plan.machines import RATES
from simpletuner_gh200.plan.planning import Plan
from simpletuner_gh200.plan.rows import PHASES, POOLS, Row
from simpletuner_gh200.plan.text import (
    BUCKET_HEADINGS,
    POOL_NAMES,
    bucket_cells,
    bucket_name,
    headline,
    nodes_lines,
    step_line,
    summary,
)
from simpletuner_gh200.units import format_bytes, format_seconds

COLOURS = {
    "weights": "#2f4b7c",
    "gradients": "#4a7f95",
    "optimizer": "#0b6e4f",
    "ema": "#7aa95c",
    "activations": "#c8553d",
    "caches": "#a07800",
    "datasets": "#8a5a9e",
    "context": "#777777",
    "text_encoder": "#d49a6a",
    "text_encoder_2": "#b5763b",
    "text_encoder_3": "#94571f",
    "vae": "#5aa9a9",
    "vae work": "#9fd0cf",
    "checkpoint": "#6b7f5a",
    "checkpoints": "#93a682",
    "cache files": "#c9b458",
    "packs": "#e0d08a",
    "process": "#9a9ab0",
}
_OTHERS = "#aaaaaa"


@dataclass(frozen=True)
class Bar:
    """One phase of one pool; ``rows`` from the largest down."""

    pool: str
    phase: str
    rows: tuple[Row, ...]
    capacity: int | None

    @property
    def total(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def over(self) -> bool:
        return self.capacity is not None and self.total > self.capacity

    @property
    def label(self) -> str:
        held = format_bytes(self.total)
        return f"{held} of {format_bytes(self.capacity)}" if self.capacity is not None else held


def colour(what: str) -> str:
    return COLOURS.get(what, _OTHERS)


def bars(plan: Plan) -> list[Bar]:
    """Every phase of every pool that holds anything."""
    found = []
    for pool in POOLS:
        for phase in PHASES:
            rows = tuple(sorted(plan.table.of(phase, pool), key=lambda row: -row.bytes))
            skipped = phase == "validate" and not plan.evaluated.facts.validates
            if rows and not skipped and not (pool == "hbm" and plan.machine.one_pool):
                found.append(Bar(pool, phase, rows, plan.machine.capacity(pool)))
    return found


def scale(found: Iterable[Bar], pool: str) -> int:
    """Bytes that the full width of a pool's bars stands for."""
    return max([1, *(max(bar.total, bar.capacity or 0) for bar in found if bar.pool == pool)])


def in_characters(plan: Plan, *, width: int = 60) -> Iterator[tuple[Bar, list[tuple[str, str]]]]:
    """(bar, its pieces as (text, colour)); ``│`` stands where the capacity ends."""
    found = bars(plan)
    for bar in found:
        whole = scale(found, bar.pool)
        pieces: list[tuple[str, str]] = []
        used = 0.0
        drawn = 0
        for row in bar.rows:
            used += row.bytes / whole * width
            length = round(used) - drawn
            if length > 0:
                pieces.append(("█" * length, colour(row.what)))
                drawn += length
        limit = round(bar.capacity / whole * width) if bar.capacity is not None else width
        if drawn < limit:
            pieces.append(("░" * (limit - drawn), _OTHERS))
        yield bar, pieces


# -- SVG -----------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP, LINE, HEIGHT, THIN = 880, 172, 190, 46, 26, 17, 18
SHOWN_BUCKETS = 8


def as_svg(plan: Plan) -> str:
    """A whole document that needs nothing but a viewer."""
    found = bars(plan)
    bottom = TOP + LINE * len(found)
    marks = [
        mark for number, bar in enumerate(found) for mark in _bar(bar, scale(found, bar.pool), TOP + LINE * number)
    ]
    if len(plan.buckets) > 1:
        marks += _bucket_bars(plan, bottom + 12)
        bottom += 12 + THIN * (1 + len(plan.buckets[:SHOWN_BUCKETS]))
    legend, rows = _legend(found, bottom + 22)
    height = bottom + 34 + 18 * rows
    title = headline(plan)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            _text(16, 26, title, size=15),
            *marks,
            *legend,
            "</svg>",
            "",
        ]
    )


def _bar(bar: Bar, whole: int, y: int) -> Iterator[str]:
    across = WIDTH - LEFT - RIGHT
    yield _text(LEFT - 10, y + 13, f"{POOL_NAMES[bar.pool]}, {bar.phase}", anchor="end")
    x = float(LEFT)
    for row in bar.rows:
        length = row.bytes / whole * across
        shown = f"{row.what}: {format_bytes(row.bytes)}, {row.source}"
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{max(length, 0.3):.1f}" height="{HEIGHT}" fill="{colour(row.what)}"'
            f"{_HATCHED if not row.certain else ''}><title>{escape(shown)}</title></rect>"
        )
        x += length
    if bar.capacity is not None:
        end = LEFT + bar.capacity / whole * across
        stroke = "#c00000" if bar.over else "#222222"
        yield f'<path d="M{end:.1f} {y - 3}V{y + HEIGHT + 3}" stroke="{stroke}" stroke-width="2"/>'
    yield _text(WIDTH - RIGHT + 10, y + 13, bar.label, fill="#c00000" if bar.over else "#222222")


def _bucket_bars(plan: Plan, y: int) -> Iterator[str]:
    """Activations by bucket, as shares of the largest."""
    most = max(bucket.hbm + bucket.grace for bucket in plan.buckets) or 1
    yield _text(LEFT - 10, y + 8, "activations by bucket", anchor="end", size=12)
    if any(bucket.grace for bucket in plan.buckets):
        yield _text(LEFT, y + 8, "in HBM; paler: in CPU memory", size=12)
    for number, bucket in enumerate(plan.buckets[:SHOWN_BUCKETS], 1):
        top, x = y + THIN * number, float(LEFT)
        yield _text(LEFT - 10, top + 10, bucket_name(bucket), anchor="end", size=12)
        for pool, size, pale in (("HBM", bucket.hbm, ""), ("CPU memory", bucket.grace, _HATCHED)):
            length = size / most * (WIDTH - LEFT - RIGHT)
            shown = f"{bucket_name(bucket)} in {pool}: {format_bytes(size)}, {bucket.note}"
            yield (
                f'<rect x="{x:.1f}" y="{top}" width="{length:.1f}" height="{THIN - 6}" '
                f'fill="{colour("activations")}"{pale}><title>{escape(shown)}</title></rect>'
            )
            x += length
        yield _text(WIDTH - RIGHT + 10, top + 10, format_bytes(bucket.hbm + bucket.grace), size=12)


_HATCHED = ' fill-opacity="0.45"'
"""What is assumed is paler."""


def _legend(found: Sequence[Bar], y: int) -> tuple[list[str], int]:
    names = list(dict.fromkeys(row.what for bar in found for row in bar.rows))
    marks = []
    for number, name in enumerate(names):
        x, line = 16 + (number % 6) * 138, y + 18 * (number // 6)
        marks.append(f'<rect x="{x}" y="{line - 10}" width="11" height="11" fill="{colour(name)}"/>')
        marks.append(_text(x + 16, line, name, size=12))
    return marks, (len(names) + 5) // 6


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, fill: str = "#222222") -> str:
    style = f'font-family="sans-serif" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


# -- page ----------------------------------------------------------------------------------------------------

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root{color-scheme:light dark}body{margin:0;font:15px/1.45 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:1rem}svg{width:100%;height:auto;border-radius:.4rem}
table{border-collapse:collapse;width:100%;font-size:.85rem;margin:.5rem 0 1.5rem}
td,th{border-bottom:1px solid #8884;padding:.25rem .5rem;text-align:left;vertical-align:top}
td:nth-child(4){white-space:nowrap}h1{font-size:1.3rem}h2{font-size:1rem}.wide{overflow-x:auto}
"""


def _rates(plan: Plan) -> Iterator[tuple[str, str, str]]:
    sources = plan.machine.rate_sources
    for name, unit in RATES.items():
        value = getattr(plan.machine, name)
        shown = f"{format_bytes(value)}/s" if unit == "bytes/s" else f"{value:.3g} {unit}"
        yield name, shown, sources[name]


def as_html(plan: Plan) -> str:
    """One page, no script, nothing from elsewhere."""
    rows = [
        (row.what, POOL_NAMES[row.pool], row.phase or "all", format_bytes(row.bytes), row.source, row.note)
        for row in sorted(plan.table.rows, key=lambda row: (row.pool, -row.bytes))
    ]
    bound = plan.evaluated.bounds
    limits = [
        (name, format_seconds(value), "binds" if name == bound.binding else "") for name, value in bound.seconds.items()
    ]
    tried = [
        (
            change.what,
            ", ".join(f"{k}={v}" for k, v in change.settings.items()),
            "yes" if change.fits else "no",
            change.cost_in_words,
        )
        for change in plan.changes
    ]
    parts = [
        f"<h1>{escape(headline(plan))}</h1>",
        *(f"<p>{escape(line)}</p>" for line in (*summary(plan), step_line(plan))),
        as_svg(plan),
        _table("Bytes", ("what", "pool", "phase", "bytes", "source", ""), rows),
        _table("Activations by bucket", BUCKET_HEADINGS, [bucket_cells(bucket) for bucket in plan.buckets]),
        _table("A step, at least", ("resource", "seconds", ""), limits),
        _table("Changes, the cheapest first", ("what", "settings", "fits", "cost"), tried),
        *(f"<p>{escape(line)}</p>" for line in nodes_lines(plan)),
        _table("Rates of the machine", ("rate", "value", "source"), list(_rates(plan))),
        *(f"<p>{escape(note)}</p>" for note in plan.notes),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(headline(plan))}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    rows_of = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<h2>{escape(title)}</h2><div class="wide"><table>{rows_of}</table></div>'
