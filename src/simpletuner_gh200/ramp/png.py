"""The schedule as a PNG, written with nothing but zlib: bars on a plain ground, and digits at the axes."""

from __future__ import annotations

import struct
import zlib

from simpletuner_gh200.ramp.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ceiling
from simpletuner_gh200.ramp.report import Report

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


def as_png(report: Report) -> bytes:
    """The bytes of the picture."""
    rows = [bytearray(WIDTH) for _ in range(HEIGHT)]
    floor, top = HEIGHT - BOTTOM, ceiling(report)
    across = WIDTH - LEFT - RIGHT
    for column in range(across):
        value = report.ramp.window(column * report.steps // across).effective
        for y in range(floor - round(value / top * (floor - TOP)), floor):
            rows[y][LEFT + column] = GREEN
    for y in range(TOP, floor + 1):
        rows[y][LEFT - 1] = GREY
    rows[floor][LEFT - 1 : WIDTH - RIGHT] = bytes([GREY]) * (across + 1)
    _write_number(rows, top, right=LEFT - 10, y=TOP)
    _write_number(rows, 0, right=LEFT - 10, y=floor - 5 * DOT)
    _write_number(rows, report.steps, right=WIDTH - RIGHT, y=floor + 10)
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
