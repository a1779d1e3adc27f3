"""What the in-memory dataset held and served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.demo.summary import SummaryLine
from simpletuner_gh200.units import format_bytes


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("dataset", _one(name, held)) for name, held in result.get("store", {}).items()]


def _one(name: str, held: Mapping[str, Any]) -> str:
    sizes = f"{format_bytes(held['bytes'])} held in {format_bytes(held['held_bytes'])}"
    reads = f"{held['served']} reads served, {held['elsewhere']} from disk"
    return f"{name}: {held['files']} files in memory, {sizes}; {reads}"


LINE = SummaryLine(order=30, lines=_lines)
