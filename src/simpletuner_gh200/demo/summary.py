"""What the demo tells people: how far it is while it trains, and what came of it in the end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner_gh200.operate.closing import Lines, closing_lines
from simpletuner_gh200.seams.seam import WAITING

Result = Mapping[str, Any]

_PHASES = (
    ("Loading data backend config", "filling datasets and caches"),
    ("Loading diffusion model", "loading the model"),
)
"""(a line of SimpleTuner's log, what begins with it)"""
_STEPS = re.compile(r"Steps:.*?(\d+)/(\d+) \[")


@dataclass(frozen=True)
class Progress:
    """What a line of the log says about how far training is; None where it says nothing."""

    phase: str | None = None
    step: int | None = None


def progress_in(line: str) -> Progress:
    steps = _STEPS.findall(line)  # a bar that was drawn over may come as one line
    if steps:
        return Progress("training", int(steps[-1][0]))
    return Progress(next((phase for text, phase in _PHASES if text in line), None))


def summary_lines(result: Result, summary: Mapping[str, Any]) -> Lines:
    """(label, text) pairs from the demo's JSON and the summary of the run behind it."""
    versions = f"SimpleTuner {result['simpletuner']}, torch {result['torch']}, Python {result['python']}"
    # A place in a module that no training imports, as those of the Web UI, is not lost.
    lost = [(name, status) for name, status in result["seams"].items() if status not in ("ok", str(WAITING))]
    return [
        ("ran", f"{versions}: a LoRA on a tiny SDXL"),
        *closing_lines({**summary, "seconds": result["seconds"]}),
        *(("seam", f"{name} is {status}") for name, status in lost),
    ]
