"""A block of lines in the demo's summary; each feature brings its own, one file each in ``summary_lines``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner_gh200.registry import contributions


@dataclass(frozen=True)
class SummaryLine:
    """Exported as ``LINE``. ``lines`` gets the demo's JSON and returns (label, text) pairs, none if it has nothing."""

    order: int
    lines: Callable[[Mapping[str, Any]], list[tuple[str, str]]]


def summary_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = contributions("simpletuner_gh200.demo.summary_lines", "LINE", SummaryLine)
    return [pair for line in sorted(found, key=lambda line: line.order) for pair in line.lines(result)]
