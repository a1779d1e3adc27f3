"""Line plots as SVG text: small, scalable, without a script. Every text in them is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from simpletuner_gh200.telemetry.printable import printable

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 28
MOST_POINTS = 400
LARGEST = 1e300
"""Of what is drawn: beyond it the ends of an axis are no numbers any more."""
COLOURS = ("#0b6e4f", "#c8553d", "#2f4b7c", "#8a5a9e", "#a07800", "#4a7f95")


def escaped(text: str) -> str:
    """For the page: no markup, and nothing that would steer a reader who looks at its source on a terminal."""
    return escape(printable(text, lines=True))


@dataclass(frozen=True)
class Line:
    """One named series of a plot."""

    name: str
    points: Sequence[Point]


def plot(
    lines: Sequence[Line],
    *,
    label: str,
    unit: Callable[[float], str],
    from_zero: bool = True,
    binary: bool = False,
) -> str:
    """An SVG with one path per line; ``unit`` writes a value of the vertical axis, round in bytes if ``binary``."""
    thinned = [Line(line.name, thin(line.points)) for line in lines]
    drawn = [line for line in thinned if line.points]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _y in line.points]
    ys = [y for line in drawn for _x, y in line.points]
    low, high = _range(min(ys), max(ys), from_zero=from_zero)
    across = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _Scale(low, high, HEIGHT - BOTTOM, TOP)
    scale = 1024.0 ** max(0, int(math.log(high, 1024))) if binary and high > 1 else 1.0
    marks = [_path(line, COLOURS[number % len(COLOURS)], across, up) for number, line in enumerate(drawn)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(label)}">'
        + _grid([tick * scale for tick in ticks(low / scale, high / scale)], up, unit)
        + _steps(min(xs), max(xs), across)
        + "".join(marks)
        + "</svg>"
        + _legend(drawn)
    )


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
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _range(low: float, high: float, *, from_zero: bool) -> tuple[float, float]:
    if from_zero:
        low = min(0.0, low)
    if high <= low:
        return low - 0.5, low + 0.5
    return low, high + (high - low) * 0.05


def _path(line: Line, colour: str, across: _Scale, up: _Scale) -> str:
    moves = " ".join(f"{'M' if not n else 'L'}{across(x):.1f},{up(y):.1f}" for n, (x, y) in enumerate(line.points))
    title = f"<title>{escaped(line.name)}</title>"
    if len(line.points) == 1:
        (x, y), *_ = line.points
        return f'<circle class="mark" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}">{title}</circle>'
    return f'<path class="mark" d="{moves}" fill="none" stroke="{colour}" stroke-width="1.8">{title}</path>'


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


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    items = (
        f'<li><span class="swatch" style="background:{COLOURS[number % len(COLOURS)]}"></span>{escaped(line.name)}</li>'
        for number, line in enumerate(lines)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
