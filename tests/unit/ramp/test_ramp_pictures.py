"""The drawings hold what the schedule says."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
import zlib

from simpletuner_gh200.ramp.pictures import (
    BOTTOM,
    GREEN,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    as_png,
    as_svg,
    in_characters,
    stairs,
)
from simpletuner_gh200.ramp.preview import RampPreview
from simpletuner_gh200.ramp.schedule import GH200GradientRamp

REPORT = RampPreview(GH200GradientRamp(1, 4, 12, curve="linear"), 10)


def test_facts_of_a_report() -> None:
    facts = REPORT.to_json()
    assert facts["windows"] == [1, 1, 2, 2, 2, 3, 4, 4, 4, 4]
    assert facts["total_samples"] == sum(facts["windows"]) == 27
    assert [(change["step"], change["effective"]) for change in facts["changes"]] == [(0, 1), (2, 2), (5, 3), (6, 4)]
    assert facts["target_reached_at_step"] == 6
    assert (facts["initial"], facts["target"], facts["optimizer_steps"]) == (1, 4, 10)


def test_a_run_that_ends_in_the_ramp_says_so() -> None:
    short = RampPreview(REPORT.ramp, 4)
    assert short.target_reached is None
    assert "before the ramp reaches its target" in short.notices[-1]
    assert [window.step for window in short.changes] == [0, 2]


def test_stairs_have_a_corner_at_every_change() -> None:
    assert stairs(REPORT) == [(0, 1), (2, 1), (2, 2), (5, 2), (5, 3), (6, 3), (6, 4), (10, 4)]


def test_characters_grow_with_the_batch() -> None:
    *rows, axis, labels = in_characters(REPORT, width=10, height=4)
    heights = [sum(row.ljust(14)[3 + column] == "█" for row in rows) for column in range(10)]
    assert heights == REPORT.to_json()["windows"]
    assert axis.startswith("0 ┼")
    assert labels.split() == ["0", "10"]


def test_svg_is_well_formed_and_spans_the_plot() -> None:
    document = ElementTree.fromstring(as_svg(REPORT))
    (line,) = document.findall("{http://www.w3.org/2000/svg}polyline")
    corners = [tuple(map(float, corner.split(","))) for corner in line.attrib["points"].split()]
    assert corners[0][0] == LEFT
    assert corners[-1] == (WIDTH - RIGHT, TOP)
    assert len(corners) == len(stairs(REPORT))


def test_png_decodes_to_bars_of_the_right_height() -> None:
    width, height, pixels = _decode(as_png(REPORT))
    assert (width, height) == (WIDTH, HEIGHT)
    plot = HEIGHT - BOTTOM - TOP
    first, last = (sum(row[x] == GREEN for row in pixels) for x in (LEFT + 1, WIDTH - RIGHT - 1))
    assert (first, last) == (round(plot / 4), plot)


def _decode(png: bytes) -> tuple[int, int, list[bytes]]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        (checksum,) = struct.unpack(">I", png[at + 8 + size : at + 12 + size])
        assert checksum == zlib.crc32(kind + data)
        chunks[kind], at = data, at + 12 + size
    width, height, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    raw = zlib.decompress(chunks[b"IDAT"])
    return width, height, [raw[row * (width + 1) + 1 : (row + 1) * (width + 1)] for row in range(height)]
