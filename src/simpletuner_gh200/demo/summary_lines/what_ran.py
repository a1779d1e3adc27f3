"""What ran: versions and steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.demo.summary import SummaryLine


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    versions = f"SimpleTuner {result['simpletuner']}, torch {result['torch']}, Python {result['python']}"
    return [("ran", versions), ("trained", f"{result['global_step']} optimizer steps of a LoRA on a tiny SDXL")]


LINE = SummaryLine(order=0, lines=_lines)
