"""Line plots and stacked bars as SVG text: small, scalable, without a script. Every text in them is escaped.

A picture stands on a page, with its legend below, or is a whole document of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import NamedTuple

from simpletuner_gh200.draw.page import escaped
from simpletuner_gh200.draw.style import GRID, INK, LIGHT, PAPER, PICTURE, SOFT, colour

Point = tuple[float, float]
Colour = int | str
"""The number of a line, which has a colour for light and for dark; or one colour for both."""

MOST_POINTS = 400
LARGEST = 1e300
"""Of what is drawn: beyond it the ends of an axis are no numbers any more."""
PALE = 0.45


@dataclass(frozen=True)
class Picture:
    """``names`` of what is drawn are the legend; nothing for a single one, which the title names."""

    label: str
    width: int
    height: int
    marks: str
    names: tuple[tuple[Colour, str], ...] = ()

    def on_page(self) -> str:
        svg = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escaped(self.label)}">'
        items = (f"<li><span {_swatch(shade)}></span>{escaped(name)}</li>" for shade, name in self._legend())
        legend = f'<ul class="legend">{"".join(items)}</ul>' if self._legend() else ""
        return f"{svg}{self.marks}</svg>{legend}"

    def document(self, above: int = 44, columns: int = 6) -> str:
        """Needs nothing but a viewer; dark where its reader's screen is."""
        legend = "".join(self._legend_marks(above + self.height + 22, columns))
        height = above + self.height + 12 + 20 * -(-len(self._legend()) // columns)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" role="img">',
                f"<title>{escaped(self.label)}</title><style>{PICTURE}</style>",
                f'<rect class="paper" width="{self.width}" height="{height}" fill="{PAPER["light"]}"/>',
                _text(16, 26, self.label, kind="title"),
                f'<g transform="translate(0 {above})">{self.marks}</g>',
                f"{legend}</svg>",
                "",
            ]
        )

    def _legend(self) -> list[tuple[Colour, str]]:
        return list(self.names) if len(self.names) > 1 else []

    def _legend_marks(self, y: int, columns: int) -> Iterator[str]:
        for number, (shade, name) in enumerate(self._legend()):
            x, line = 16 + number % columns * (self.width - 32) // columns, y + 20 * (number // columns)
            yield f'<rect {_painted("mark", shade, "fill")} x="{x}" y="{line - 10}" width="11" height="11"/>'
            yield _text(x + 16, line, name, kind="label")


def _painted(kind: str, shade: Colour, attribute: str) -> str:
    """Attributes of a mark: its class, and its colour for viewers that know no style sheets."""
    if isinstance(shade, int):
        return f'class="{kind} {colour(shade)}" {attribute}="{LIGHT[shade % len(LIGHT)]}"'
    return f'class="{kind}" style="--own:{shade}" {attribute}="{shade}"'


def _swatch(shade: Colour) -> str:
    return f'class="swatch {colour(shade)}"' if isinstance(shade, int) else f'class="swatch" style="--own:{shade}"'


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    plain = f'fill="{INK["light"] if kind == "title" else SOFT["light"]}" font-family="sans-serif"'
    size = {"title": 15, "label": 13}.get(kind.partition(" ")[0], 11)
    named = f' class="{kind}"' if kind else ""
    return (
        f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" {plain}>{escaped(text)}</text>'
    )


# -- plots ---------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 84, 22, 12, 28


@dataclass(frozen=True)
class Line:
    """One named series of a plot. ``steps``: a value holds until the next one. ``raw``: faint, behind the next line."""

    name: str
    points: Sequence[Point]
    steps: bool = False
    raw: bool = False
    level: bool = False
    """One value that was foreseen, drawn across the plot."""


def plot(
    lines: Sequence[Line],
    *,
    label: str,
    unit: Callable[[float], str],
    from_zero: bool = True,
    binary: bool = False,
    top: float | None = None,
) -> Picture | None:
    """One path per line, None where none has a point; ``unit`` writes a value, round in bytes if ``binary``.

    ``top``: where the vertical axis ends, if some values are to lie beyond it.
    """
    drawn = [line for line in (replace(line, points=_shown(line)) for line in lines) if line.points]
    measured = [line for line in drawn if not line.level]
    if not measured:
        return None
    xs = [x for line in measured for x, _y in line.points]
    ys = [min(y, top) if top is not None else y for line in drawn for _x, y in line.points]
    low, high = _range(min(ys), max(ys), from_zero=from_zero)
    across = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _Scale(low, high, HEIGHT - BOTTOM, TOP)
    scale = 1024.0 ** max(0, int(math.log(high, 1024))) if binary and high > 1 else 1.0
    marks = [_grid(up(tick * scale), unit(tick * scale)) for tick in ticks(low / scale, high / scale)]
    marks += [
        _text(across(value), HEIGHT - 8, str(value), anchor="middle")
        for value in sorted({round(value) for value in ticks(min(xs), max(xs), 5)})
        if min(xs) <= value <= max(xs)
    ]
    numbered = _numbered(drawn)
    marks += [_mark(line, number, across, up) for number, line in numbered]
    # A raw line goes by the name of the one that it is drawn behind.
    names = tuple({number: line.name for number, line in numbered}.items())
    return Picture(label, WIDTH, HEIGHT, "".join(marks), names)


def _numbered(lines: Sequence[Line]) -> list[tuple[int, Line]]:
    """Lines with the numbers of their colours: a raw line has that of the line it is drawn behind."""
    numbered, number = [], 0
    for line in lines:
        numbered.append((number, line))
        number += not line.raw
    return numbered


def _shown(line: Line) -> Sequence[Point]:
    clean = [(x, y) for x, y in line.points if abs(y) < LARGEST]
    return _changes(clean) if line.steps else thin(clean)


def _changes(points: Sequence[Point]) -> list[Point]:
    """Only where the value changes, and the end: all that steps need."""
    kept = [point for number, point in enumerate(points) if not number or point[1] != points[number - 1][1]]
    return [*kept, points[-1]] if points and kept[-1] != points[-1] else kept


def thin(points: Sequence[Point]) -> list[Point]:
    """At most ``MOST_POINTS``: of each stretch its lowest and its highest, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    stretch = math.ceil(len(points) / (MOST_POINTS // 2))
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def smoothed(points: Sequence[Point]) -> list[Point]:
    """A running mean that forgets, over about a twenty-fifth of the run; from the first point on without a bias."""
    keep = 1 - 2 / (max(5.0, len(points) / 25) + 1)
    shown, mean, weight = [], 0.0, 0.0
    for x, y in points:
        if abs(y) < LARGEST:
            mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
            shown.append((x, mean / weight))
    return shown


def sensible_top(values: Sequence[float]) -> float | None:
    """Where an axis should end so that a few giants don't flatten the rest; None where there are none."""
    if len(values) < 20:
        return None
    usual = quantiles(values, n=100)[97]
    return usual * 1.5 if 0 < usual * 3 < max(values) < LARGEST else None


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values that cover the range."""
    raw = (high - low) / count
    if raw <= 0:  # also where the two ends are so near that a part of the way between them is no number
        return [low]
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9) * step
    return [first + number * step for number in range(int((high - first) / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        share = (value - self.low) / (self.high - self.low)
        return self.start + max(-0.02, min(share, 1.02)) * (self.end - self.start)


def _range(low: float, high: float, *, from_zero: bool) -> tuple[float, float]:
    low = min(0.0, low) if from_zero else low
    return (low, high + (high - low) * 0.05) if high > low else (low - 0.5, low + 0.5)


def _mark(line: Line, shade: int, across: _Scale, up: _Scale) -> str:
    title = f"<title>{escaped(line.name)}</title>"
    kind = "raw" if line.raw else "level" if line.level else "mark"
    places = [(f"{across(x):.1f}", f"{up(y):.1f}") for x, y in line.points]
    if line.level:
        path = f"M{LEFT},{places[0][1]} H{WIDTH - RIGHT}"
    elif len(places) == 1:
        (x, y), *_ = places
        return f'<circle {_painted(kind, shade, "fill")} cx="{x}" cy="{y}" r="3">{title}</circle>'
    else:
        (x, y), *rest = places
        path = " ".join([f"M{x},{y}", *(f"H{x} V{y}" if line.steps else f"L{x},{y}" for x, y in rest)])
    return f'<path {_painted(kind, shade, "stroke")} fill="none" d="{path}">{title}</path>'


def _grid(y: float, text: str) -> str:
    line = f'<line class="grid" stroke="{GRID["light"]}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(LEFT - 6, y + 4, text, anchor="end")


# -- bars ----------------------------------------------------------------------------------------------------

BARS_WIDTH, BAR, EACH = 880, 18, 26
NAME, NOTE = 172, 190
"""Columns left and right of the bars, where any bar has words for them."""


class Piece(NamedTuple):
    """``words`` are shown where a pointer rests on it."""

    name: str
    size: float
    colour: Colour
    words: str
    pale: bool = False


@dataclass(frozen=True)
class Bar:
    """Pieces in a row. ``whole`` is as wide as the picture; ``limit``: where a line is drawn."""

    pieces: Sequence[Piece]
    whole: float
    name: str = ""
    note: str = ""
    limit: float | None = None

    @property
    def over(self) -> bool:
        return self.limit is not None and sum(piece.size for piece in self.pieces) > self.limit


def bars(rows: Sequence[Bar], *, label: str) -> Picture:
    left = NAME if any(bar.name for bar in rows) else 0
    across = BARS_WIDTH - left - (NOTE if any(bar.note for bar in rows) else 0)
    marks = [mark for number, bar in enumerate(rows) for mark in _bar(bar, left, across, 4 + EACH * number)]
    names = {piece.name: piece.colour for bar in rows for piece in bar.pieces}
    legend = tuple((shade, name) for name, shade in names.items())
    return Picture(label, BARS_WIDTH, 8 + EACH * len(rows), "".join(marks), legend)


def _bar(bar: Bar, left: int, across: int, y: int) -> Iterator[str]:
    if bar.name:
        yield _text(left - 10, y + 13, bar.name, anchor="end", kind="label")
    x = float(left)
    for piece in bar.pieces:
        width = piece.size / bar.whole * across
        pale = f' fill-opacity="{PALE}"' if piece.pale else ""
        yield (
            f'<rect {_painted("mark", piece.colour, "fill")}{pale} x="{x:.1f}" y="{y}" '
            f'width="{max(width, 0.3):.1f}" height="{BAR}"><title>{escaped(piece.words)}</title></rect>'
        )
        x += width
    bad = " bad" if bar.over else ""
    if bar.limit is not None:
        end = left + bar.limit / bar.whole * across
        yield f'<path class="limit{bad}" stroke="{INK["light"]}" d="M{end:.1f} {y - 3}V{y + BAR + 3}"/>'
    if bar.note:
        yield _text(left + across + 10, y + 13, bar.note, kind=f"label{bad}")
