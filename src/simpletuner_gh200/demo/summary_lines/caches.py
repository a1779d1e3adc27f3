"""What the unified caches held and how often they hit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.demo.summary import SummaryLine
from simpletuner_gh200.units import format_bytes


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("cache", _one(name, cache)) for name, cache in result.get("cache", {}).items()]


def _one(name: str, cache: Mapping[str, Any]) -> str:
    hits = f"{cache['hits']} hits, {cache['misses']} misses"
    return f"{name}: {cache['entries']} entries, {format_bytes(cache['bytes'])}, {hits}"


LINE = SummaryLine(order=40, lines=_lines)
