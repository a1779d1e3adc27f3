"""The seams and the features: what is in place and on, and each that is not, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.demo.summary import SummaryLine


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    seams = result["seams"]
    holding = [name for name, status in seams.items() if status == "ok"]
    lines = [("seams", f"{len(holding)} of {len(seams)} in place: {', '.join(holding)}")]
    lines += [("seam", f"{name} is {status}") for name, status in seams.items() if status != "ok"]
    features = result["features"]
    lines.append(("features", "on: " + ", ".join(name for name, status in features.items() if status == "on")))
    return lines + [("feature", f"{name} is {status}") for name, status in features.items() if status != "on"]


LINE = SummaryLine(order=20, lines=_lines)
