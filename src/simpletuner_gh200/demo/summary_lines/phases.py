"""Where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.demo.summary import SummaryLine
from simpletuner_gh200.units import format_seconds


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("seconds", "  ".join(f"{name} {format_seconds(value)}" for name, value in result["seconds"].items()))]


LINE = SummaryLine(order=10, lines=_lines)
