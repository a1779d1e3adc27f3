"""How the effective batch grew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.demo.summary import SummaryLine


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    ramp = result.get("ramp")
    if not ramp:
        return []
    grown = " → ".join(f"{change['effective']} (step {change['step']})" for change in ramp["changes"])
    return [("ramp", f"effective batch {grown}; {ramp['samples']} samples")]


LINE = SummaryLine(order=50, lines=_lines)
