"""A plan as a picture: bars per pool and phase, for a terminal, as SVG, and on a page with the table below it."""

from __future__ import annotations

from collections.abc import Iterator

from simpletuner_gh200.draw import charts
from simpletuner_gh200.draw.page import page, paragraphs, section, table
from simpletuner_gh200.plan.changes import in_words
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
SHOWN_BUCKETS = 8


def bars(plan: Plan) -> Iterator[charts.Bar]:
    """Every phase of every pool that holds anything, each row of the plan a piece, from the largest down."""
    for pool in POOLS:
        phases = [phase for phase in PHASES if phase != "validate" or plan.evaluated.facts.validates]
        held = {phase: sorted(plan.evaluated.of(phase, pool), key=lambda row: -row.bytes) for phase in phases}
        capacity = plan.machine.capacity(pool)
        whole = max(1, capacity or 0, *(sum(row.bytes for row in rows) for rows in held.values()))
        for phase, rows in held.items():
            total = format_bytes(sum(row.bytes for row in rows))
            note = f"{total} of {format_bytes(capacity)}" if capacity is not None else total
            if rows:
                pieces = tuple(map(_piece, rows))
                yield charts.Bar(pieces, whole, name=f"{POOL_NAMES[pool]}, {phase}", note=note, limit=capacity)


def _piece(row: Row) -> charts.Piece:
    words = f"{row.what}: {format_bytes(row.bytes)}, {row.source}"
    return charts.Piece(row.what, row.bytes, COLOURS.get(row.what, _OTHERS), words, pale=not row.certain)


def in_characters(bar: charts.Bar, *, width: int = 60) -> Iterator[tuple[str, str]]:
    """(text, colour) of its pieces; pale up to where the capacity ends."""
    used, drawn = 0.0, 0
    for piece in bar.pieces:
        used += piece.size
        length = round(used / bar.whole * width) - drawn
        if length > 0:
            yield "█" * length, str(piece.colour)
            drawn += length
    limit = round(bar.limit / bar.whole * width) if bar.limit is not None else width
    if drawn < limit:
        yield "░" * (limit - drawn), _OTHERS


def _picture(plan: Plan) -> charts.Picture:
    """What is assumed is paler. Below, each bucket's activations as shares of the largest; paler: in CPU memory."""
    rows = list(bars(plan))
    if len(plan.buckets) > 1:
        most = max(bucket.hbm + bucket.grace for bucket in plan.buckets) or 1
        rows.append(charts.Bar((), 1, note="activations by bucket"))
        for bucket in plan.buckets[:SHOWN_BUCKETS]:
            name = bucket_name(bucket)
            held = {pool: size for pool, size in (("HBM", bucket.hbm), ("CPU memory", bucket.grace)) if size}
            words = {pool: f"{name} in {pool}: {format_bytes(size)}, {bucket.note}" for pool, size in held.items()}
            shade = COLOURS["activations"]
            pieces = [charts.Piece("activations", held[at], shade, words[at], pale=at != "HBM") for at in held]
            rows.append(charts.Bar(pieces, most, name=name, note=format_bytes(bucket.hbm + bucket.grace)))
    return charts.bars(rows, label=headline(plan))


def as_svg(plan: Plan) -> str:
    """A whole document that needs nothing but a viewer."""
    return _picture(plan).document()


def as_html(plan: Plan) -> str:
    """One page, no script, nothing from elsewhere."""
    held = [
        (row.what, POOL_NAMES[row.pool], row.phase or "all", format_bytes(row.bytes), row.source, row.note)
        for row in sorted(plan.evaluated.rows, key=lambda row: (row.pool, -row.bytes))
    ]
    bound = plan.evaluated
    limits = [
        (name, format_seconds(value), "binds" if name == bound.binding else "") for name, value in bound.seconds.items()
    ]
    changes = [
        (change.what, in_words(change.settings), "yes" if change.fits else "no", change.cost_in_words)
        for change in plan.changes
    ]
    buckets = [bucket_cells(bucket) for bucket in plan.buckets]
    return page(
        headline(plan),
        [
            paragraphs((*summary(plan), step_line(plan))),
            _picture(plan).on_page(),
            section("Bytes", table(("what", "pool", "phase", "bytes", "source", ""), held)),
            section("Activations by bucket", table(BUCKET_HEADINGS, buckets)),
            section("A step, at least", table(("resource", "seconds", ""), limits)),
            section("Changes, the cheapest first", table(("what", "settings", "fits", "cost"), changes)),
            paragraphs(nodes_lines(plan)),
            section("Rates of the machine", table(("rate", "value", "source"), list(_rates(plan)))),
            paragraphs(plan.notes),
        ],
    )


def _rates(plan: Plan) -> Iterator[tuple[str, str, str]]:
    for name, unit in RATES.items():
        value = getattr(plan.machine, name)
        shown = f"{format_bytes(value)}/s" if unit == "bytes/s" else f"{value:.3g} {unit}"
        yield name, shown, plan.machine.rate_sources[name]
