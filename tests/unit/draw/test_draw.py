"""Pictures and pages: nothing is lost by thinning, every colour can be seen, and hostile words stay words."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.draw import style
from simpletuner_gh200.draw.charts import MOST_POINTS, PALE, Bar, Line, Piece, bars, plot, thin, ticks

HOSTILE = "</title></style><script>alert(1)</script>\"'&\x1b]0;owned\x07"
SVG = "{http://www.w3.org/2000/svg}"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_the_extremes(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thin(points)
    assert len(kept) <= max(MOST_POINTS, 2)
    assert {min(values), max(values)} <= {y for _x, y in kept}


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_lie_in_the_range(low: float, width: float) -> None:
    values = ticks(low, low + width)
    assert len(values) <= 12
    slack = width * 1e-6 + abs(low) * 1e-9
    assert all(low - slack <= value <= low + width + slack for value in values)


def test_a_plot_of_nothing_is_nothing() -> None:
    assert plot([Line("a", [])], label="a", unit=str) is None
    one = plot([Line("a", [(1, 2.0)])], label="a", unit=str)
    assert one is not None and "circle" in one.marks


def test_bars_stand_in_their_row_up_to_the_limit_and_say_what_they_are() -> None:
    pieces = [Piece("weights", 30, "#2f4b7c", "weights: 30"), Piece(HOSTILE, 20, 1, HOSTILE, pale=True)]
    picture = bars([Bar(pieces, 100, name=HOSTILE, note="50 of 40", limit=40)], label=HOSTILE)
    root = ElementTree.fromstring(picture.document())
    drawn = [rect for rect in root.iter(f"{SVG}rect") if rect.attrib.get("height") == "18"]
    first, second = ({name: float(rect.attrib[name]) for name in ("x", "width")} for rect in drawn)
    assert first["width"] == pytest.approx(1.5 * second["width"]) and second["x"] == first["x"] + first["width"]
    assert [rect.attrib.get("fill-opacity") for rect in drawn] == [None, str(PALE)]
    (limit,) = (path for path in root.iter(f"{SVG}path") if "limit" in path.attrib["class"])
    assert "bad" in limit.attrib["class"] and float(limit.attrib["d"][1:].split()[0]) > second["x"]
    assert not list(root.iter(f"{SVG}script")) and "<script" not in picture.on_page()
    assert "\x1b" not in picture.document() + picture.on_page()
    assert picture.on_page().count("<li>") == 2, "a legend"


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_stands_out_from_what_it_is_drawn_on(scheme: str, number: int) -> None:
    colours = {"light": style.LIGHT, "dark": style.DARK}[scheme]
    for ground in (style.CARD[scheme], style.PAPER[scheme]):
        assert contrast(colours[number], ground) >= 4.5
        assert min(contrast(words[scheme], ground) for words in (style.INK, style.SOFT)) >= 4.5


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio."""

    def light(colour: str) -> float:
        parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    brighter, darker = sorted((light(one), light(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)
