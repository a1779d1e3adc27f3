"""Unified caches: hits, batches, SimpleTuner's own caches over them, warm starts, and what is held."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.cache_memory import SHAPES, measure_memory
from simpletuner_gh200.bench.cache_sharing import measure_sharing
from simpletuner_gh200.bench.cache_simpletuner import measure_simpletuner
from simpletuner_gh200.bench.cache_warm_start import measure_warm_start
from simpletuner_gh200.bench.suite import Suite

COUNTS = {"32KB": 2048, "512KB": 512}
QUICK_COUNTS = {"32KB": 64, "512KB": 32}


def measure(quick: bool) -> dict[str, Any]:
    counts, repeats = (QUICK_COUNTS, 1) if quick else (COUNTS, 7)
    result: dict[str, Any] = {"batch16": {}, "hit": {}}
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name:
        folder = Path(name)
        for size in SHAPES:
            batch, hit = measure_memory(folder / size, size, counts[size], repeats)
            result["batch16"][size], result["hit"][size] = batch, hit
        result["warm_start"] = measure_warm_start(folder / "warm", 16 if quick else 1024, repeats)
        sharing = measure_sharing(folder / "sharing", 16 if quick else 512)
        result["held_ratio"] = sharing.pop("held_ratio")
        result["sharing"] = sharing
        result["simpletuner"] = measure_simpletuner(folder / "simpletuner", 16 if quick else 512, 1 if quick else 5)
    return result


SUITE = Suite("cache", "Unified caches: hits, batches, SimpleTuner over them, warm starts, memory held.", measure)
