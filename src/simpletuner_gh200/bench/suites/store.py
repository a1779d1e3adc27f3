"""The in-memory dataset: discovery, staging, reading, index, sharing, and SimpleTuner's own pipeline over it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.store_files import SIZES
from simpletuner_gh200.bench.store_pipeline import measure_pipeline
from simpletuner_gh200.bench.store_reading import measure_index, measure_reading
from simpletuner_gh200.bench.store_sharing import measure_sharing
from simpletuner_gh200.bench.store_staging import measure_staging, measure_walk
from simpletuner_gh200.bench.suite import Suite

COUNTS = {"400B": 20_000, "100KB": 2_000, "2MB": 100}
QUICK_COUNTS = {"400B": 200, "100KB": 20, "2MB": 4}


def measure(quick: bool) -> dict[str, Any]:
    counts, repeats = (QUICK_COUNTS, 1) if quick else (COUNTS, 7)
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name:
        folder = Path(name)
        result: dict[str, Any] = {
            "staging": {
                size: measure_staging(folder / f"stage-{size}", SIZES[size], counts[size], repeats) for size in SIZES
            },
            "walk": measure_walk(folder / "walk", counts["400B"], repeats),
            "read": {
                size: measure_reading(folder / f"read-{size}", SIZES[size], counts[size], repeats)
                for size in ("100KB", "2MB")
            },
            "index": measure_index(2_000 if quick else 1_000_000, repeats),
            "sharing": measure_sharing(folder / "sharing", SIZES["2MB"], 8 if quick else 540),
        }
        result["pipeline"] = measure_pipeline(folder / "pipeline", 20 if quick else 2_000, 1 if quick else 5)
    return result


SUITE = Suite("store", "The in-memory dataset: staging, reading, sharing, and SimpleTuner's pipeline over it.", measure)
