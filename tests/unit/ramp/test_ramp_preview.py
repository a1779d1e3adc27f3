"""A ramp before its run: its facts, and drawings that hold what the schedule says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from simpletuner_gh200.draw.charts import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH
from simpletuner_gh200.ramp.preview import RampPreview, as_svg, in_characters
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


def test_characters_grow_with_the_batch() -> None:
    *rows, axis, labels = in_characters(REPORT, width=10, height=4)
    heights = [sum(row.ljust(14)[3 + column] == "█" for row in rows) for column in range(10)]
    assert heights == REPORT.to_json()["windows"]
    assert axis.startswith("0 ┼")
    assert labels.split() == ["0", "10"]


def test_svg_is_well_formed_and_has_a_corner_at_every_change() -> None:
    document = ElementTree.fromstring(as_svg(REPORT))
    (line,) = (path for path in document.iter("{http://www.w3.org/2000/svg}path") if "mark" in path.attrib["class"])
    corners = re.findall(r"H([\d.]+) V([\d.]+)", line.attrib["d"])
    steps = [(float(x) - LEFT) / (WIDTH - RIGHT - LEFT) * 10 for x, _y in corners]
    assert [round(step, 1) for step in steps] == [2, 5, 6, 10]
    heights = [HEIGHT - BOTTOM - float(y) for _x, y in corners]
    assert [round(4 * height / heights[-1]) for height in heights] == [2, 3, 4, 4]
