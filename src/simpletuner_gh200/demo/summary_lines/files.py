"""Where the files are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner_gh200.demo.summary import SummaryLine


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    checkpoint = Path(result["checkpoint"])
    weights = checkpoint.parent / "pytorch_lora_weights.safetensors"
    return [("checkpoint", str(checkpoint)), ("weights", str(weights)), ("project", str(checkpoint.parent.parent))]


LINE = SummaryLine(order=90, lines=_lines)
