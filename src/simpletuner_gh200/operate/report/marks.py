"""Line plots and bars as SVG text: small, scalable, without a script. Every text in them is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import quantiles

from simpletuner_gh200.operate.report.style import colour
from simpletuner_gh200.telemetry.printable import printable

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 84, 22, 12, 28
MOST_POINTS = 400
LARGEST = 1e300
"""Of what is drawn: beyond it the ends of an axis are no numbers any more."""
BAR = 34
"""Height of a stacked bar."""


def escaped(text: str) -> str:
    """For the page: no markup, and nothing that would steer a reader who looks at its source on a terminal."""
    return escape(printable(text, lines=True))


def breakable(text: str) -> str:
    """Escaped, with places where a long key or path may go on in the next line: after dots, slashes and the like."""
    # Entities that escaping makes hold none of these characters, and numbers stay whole.
    parted = re.sub(r"([._/=,:-])(?=[^\W\d])", r"\1<wbr>", escaped(text))
    return re.sub(r"([^\s<>&;]{24})(?=[^\s<>&;]{8})", r"\1<wbr>", parted)  # a checksum has no such place


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
) -> str:
    """An SVG with one path per line; ``unit`` writes a value of the vertical axis, round in bytes if ``binary``.

    ``top``: where the vertical axis ends, if some values are to lie beyond it.
    """
    thinned = [replace(line, points=_shown(line)) for line in lines]
    drawn = [line for line in thinned if line.points]
    measured = [line for line in drawn if not line.level]
    if not measured:
        return ""
    xs = [x for line in measured for x, _y in line.points]
    ys = [min(y, top) if top is not None else y for line in drawn for _x, y in line.points]
    low, high = _range(min(ys), max(ys), from_zero=from_zero)
    across = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _Scale(low, high, HEIGHT - BOTTOM, TOP)
    scale = 1024.0 ** max(0, int(math.log(high, 1024))) if binary and high > 1 else 1.0
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(label)}">'
        + _grid([tick * scale for tick in ticks(low / scale, high / scale)], up, unit)
        + _steps(min(xs), max(xs), across)
        + "".join(_mark(line, colour(number), across, up) for number, line in _coloured(drawn))
        + "</svg>"
        + legend([(number, line.name) for number, line in _coloured(drawn)])
    )


def _coloured(lines: Sequence[Line]) -> list[tuple[int, Line]]:
    """Lines with the numbers of their colours: a raw line has that of the line it is drawn behind."""
    numbered, number = [], 0
    for line in lines:
        numbered.append((number, line))
        number += not line.raw
    return numbered


def _shown(line: Line) -> Sequence[Point]:
    if line.steps:
        return changes([point for point in line.points if abs(point[1]) < LARGEST])
    return thin(line.points)


def changes(points: Sequence[Point]) -> list[Point]:
    """Only where the value changes, and the end: all that steps need."""
    kept = [point for number, point in enumerate(points) if not number or point[1] != points[number - 1][1]]
    return [*kept, points[-1]] if points and kept[-1] != points[-1] else kept


def thin(points: Sequence[Point]) -> list[Point]:
    """At most ``MOST_POINTS``: of each stretch its lowest and its highest, so that no spike is lost."""
    clean = [(x, y) for x, y in points if abs(y) < LARGEST]
    if len(clean) <= MOST_POINTS:
        return clean
    stretch = math.ceil(len(clean) / (MOST_POINTS // 2))
    kept: list[Point] = []
    for start in range(0, len(clean), stretch):
        part = clean[start : start + stretch]
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def smoothed(points: Sequence[Point]) -> list[Point]:
    """A running mean that forgets, over about a twenty-fifth of the run; from the first point on without a bias."""
    keep = 1 - 2 / (max(5.0, len(points) / 25) + 1)
    shown, mean, weight = [], 0.0, 0.0
    for x, y in points:
        if abs(y) >= LARGEST:
            continue
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


def stacked(parts: Sequence[tuple[str, float]], *, label: str) -> str:
    """One bar of named parts, as wide as their shares."""
    whole = sum(size for _name, size in parts)
    if whole <= 0:
        return ""
    marks, left = [], 0.0
    for number, (name, size) in enumerate(parts):
        width = size / whole * WIDTH
        marks.append(
            f'<rect class="mark {colour(number)}" x="{left:.1f}" y="0" width="{max(width - 1, 0.5):.1f}" '
            f'height="{BAR}"><title>{escaped(name)}</title></rect>'
        )
        left += width
    picture = f'<svg viewBox="0 0 {WIDTH} {BAR}" role="img" aria-label="{escaped(label)}">{"".join(marks)}</svg>'
    return picture + legend([(number, name) for number, (name, _size) in enumerate(parts)])


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
    if from_zero:
        low = min(0.0, low)
    if high <= low:
        return low - 0.5, low + 0.5
    return low, high + (high - low) * 0.05


def _mark(line: Line, shade: str, across: _Scale, up: _Scale) -> str:
    title = f"<title>{escaped(line.name)}</title>"
    kind = "raw" if line.raw else "level" if line.level else "mark"
    if line.level:
        path = f"M{LEFT},{up(line.points[0][1]):.1f} H{WIDTH - RIGHT}"
    elif len(line.points) == 1:
        (x, y), *_ = line.points
        return f'<circle class="{kind} {shade}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3">{title}</circle>'
    elif line.steps:
        path = " ".join(
            f"H{across(x):.1f} V{up(y):.1f}" if number else f"M{across(x):.1f},{up(y):.1f}"
            for number, (x, y) in enumerate(line.points)
        )
    else:
        path = " ".join(f"{'L' if n else 'M'}{across(x):.1f},{up(y):.1f}" for n, (x, y) in enumerate(line.points))
    return f'<path class="{kind} {shade}" d="{path}">{title}</path>'


def _grid(values: Sequence[float], up: _Scale, unit: Callable[[float], str]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{escaped(unit(value))}</text>'
        for value in values
    )


def _steps(low: float, high: float, across: _Scale) -> str:
    whole = sorted({round(value) for value in ticks(low, high, 5)})
    return "".join(
        f'<text x="{across(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value}</text>'
        for value in whole
        if low <= value <= high
    )


def legend(names: Sequence[tuple[int, str]]) -> str:
    """(number of the colour, name); nothing for a single line, which the title names."""
    if len(names) < 2:
        return ""
    items = (
        f'<li><span class="swatch {colour(number)}"></span>{escaped(name)}</li>'
        for number, name in dict(names).items()  # a raw line goes by the name of the one before it
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
