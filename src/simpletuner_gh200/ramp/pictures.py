"""The schedule as a picture: characters for a terminal, SVG for a document, PNG with nothing but zlib."""

from __future__ import annotations

import struct
import zlib
from html import escape

from simpletuner_gh200.ramp.preview import RampPreview
from simpletuner_gh200.units import counted

EIGHTHS = " ▁▂▃▄▅▆▇█"

Point = tuple[float, float]


def stairs(preview: RampPreview) -> list[Point]:
    """Corners of the line (optimizer step, effective batch), from the first step to the last."""
    points: list[Point] = []
    for window in preview.changes:
        if points:
            points.append((window.step, points[-1][1]))
        points.append((window.step, window.effective))
    points.append((preview.steps, points[-1][1]))
    return points


def ceiling(preview: RampPreview) -> int:
    return max(window.effective for window in preview.changes)


def in_characters(preview: RampPreview, *, width: int = 60, height: int = 10) -> list[str]:
    """Lines of block characters with a scale at the left and the optimizer steps below."""
    top = ceiling(preview)
    columns = [preview.ramp.window(column * preview.steps // width).effective for column in range(width)]
    levels = [max(1, round(value * height * 8 / top)) for value in columns]
    margin = len(str(top))
    lines = []
    for row in range(height, 0, -1):
        label = str(top) if row == height else ""
        cells = "".join(EIGHTHS[min(8, max(0, level - (row - 1) * 8))] for level in levels)
        lines.append(f"{label:>{margin}} ┤{cells}".rstrip())
    lines.append(f"{0:>{margin}} ┼{'─' * width}")
    lines.append(f"{'':>{margin}}  0{preview.steps:>{width - 1}}")
    return lines


WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 48


def to_pixels(preview: RampPreview) -> list[Point]:
    """The stairs in picture coordinates, y downwards."""
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    top = ceiling(preview)
    return [(LEFT + x / preview.steps * across, HEIGHT - BOTTOM - y / top * down) for x, y in stairs(preview)]


def as_svg(preview: RampPreview) -> str:
    """A whole SVG document; needs nothing to be drawn but a viewer."""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in to_pixels(preview))
    floor = HEIGHT - BOTTOM
    title = (
        f"effective batch {preview.changes[0].effective} to {preview.changes[-1].effective}, {preview.ramp.curve}, "
        f"{counted(preview.total_samples, 'sample')} in {counted(preview.steps, 'optimizer step')}"
    )
    area = f"{LEFT},{floor} {line} {WIDTH - RIGHT},{floor}"
    labels = [
        _label(LEFT - 8, TOP + 4, str(ceiling(preview)), "end"),
        _label(LEFT - 8, floor + 4, "0", "end"),
        _label(LEFT, floor + 20, "0", "middle"),
        _label(WIDTH - RIGHT, floor + 20, str(preview.steps), "end"),
        _label((LEFT + WIDTH - RIGHT) // 2, floor + 36, "optimizer step", "middle"),
        _label(LEFT, 24, title, "start"),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<polygon points="{area}" fill="#76b900" fill-opacity="0.25"/>',
            f'<polyline points="{line}" fill="none" stroke="#4a7600" stroke-width="2"/>',
            f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}" fill="none" stroke="#444444"/>',
            *labels,
            "</svg>",
            "",
        ]
    )


def _label(x: float, y: float, text: str, anchor: str) -> str:
    style = f'font-family="sans-serif" font-size="13" fill="#222222" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


# -- PNG: bars on a plain ground, and digits at the axes -----------------------------------------------

WHITE, GREEN, GREY, BLACK = 0, 1, 2, 3
PALETTE = bytes((255, 255, 255, 118, 185, 0, 110, 110, 110, 30, 30, 30))

# Three columns by five rows for each digit, a row per octal figure.
DIGITS = {
    "0": "75557",
    "1": "26227",
    "2": "71747",
    "3": "71717",
    "4": "55711",
    "5": "74717",
    "6": "74757",
    "7": "71111",
    "8": "75757",
    "9": "75717",
}
DOT = 3
"""Pixels per dot of a digit."""


def as_png(preview: RampPreview) -> bytes:
    """The bytes of the picture."""
    rows = [bytearray(WIDTH) for _ in range(HEIGHT)]
    floor, top = HEIGHT - BOTTOM, ceiling(preview)
    across = WIDTH - LEFT - RIGHT
    for column in range(across):
        value = preview.ramp.window(column * preview.steps // across).effective
        for y in range(floor - round(value / top * (floor - TOP)), floor):
            rows[y][LEFT + column] = GREEN
    for y in range(TOP, floor + 1):
        rows[y][LEFT - 1] = GREY
    rows[floor][LEFT - 1 : WIDTH - RIGHT] = bytes([GREY]) * (across + 1)
    _write_number(rows, top, right=LEFT - 10, y=TOP)
    _write_number(rows, 0, right=LEFT - 10, y=floor - 5 * DOT)
    _write_number(rows, preview.steps, right=WIDTH - RIGHT, y=floor + 10)
    return encode(rows)


def encode(rows: list[bytearray]) -> bytes:
    """An 8-bit palette PNG of the rows."""
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    chunks = ((b"IHDR", header), (b"PLTE", PALETTE), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _write_number(rows: list[bytearray], number: int, *, right: int, y: int) -> None:
    text = str(number)
    left = right - len(text) * 4 * DOT + DOT
    for place, digit in enumerate(text):
        for row, figure in enumerate(DIGITS[digit]):
            for column in range(3):
                if int(figure) >> (2 - column) & 1:
                    _fill_dot(rows, left + (place * 4 + column) * DOT, y + row * DOT)


def _fill_dot(rows: list[bytearray], x: int, y: int) -> None:
    for row in rows[y : y + DOT]:
        row[x : x + DOT] = bytes([BLACK]) * DOT
