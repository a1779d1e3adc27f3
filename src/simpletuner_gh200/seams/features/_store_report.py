"""The list of a dataset's broken files, beside the run's other output."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("simpletuner_gh200")


def write_problems(report: Mapping[str, Any], dataset: str, output: Path) -> Path:
    """``<output>/gh200/staging-<dataset>.json``, written whole or not at all."""
    folder = output / "gh200"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"staging-{re.sub(r'[^A-Za-z0-9._-]', '_', dataset)}.json"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(report, indent=1), encoding="utf-8")
    draft.replace(path)
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(report["problem_counts"].items()))
    logger.warning("gh200: dataset %s: %s; listed in %s", dataset, counts, path)
    return path
