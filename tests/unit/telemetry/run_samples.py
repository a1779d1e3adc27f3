"""Runs with made-up numbers, as their ranks would record them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.telemetry.sink import JsonLines

GIB = 1 << 30
START = 1_000_000.0


def caches(hits: int, misses: int, *, held: int) -> dict[str, Any]:
    return {"caches": {"vae": {"hits": hits, "misses": misses, "hit_rate": hits / (hits + misses), "held_bytes": held}}}


def healthy(step: int, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "step",
        "step": step,
        "time": START + step,
        "step_seconds": 1.0,
        "data_wait_seconds": 0.01,
        "effective_batch": 16,
        "loss": 0.5,
        "major_faults": 10,
        "host": {"available": 300 * GIB, "total": 480 * GIB},
        "device": {"free": 20 * GIB, "total": 96 * GIB},
        "features": caches(step * 16, 0, held=GIB),
    }
    return {**record, **changes}


def run_of(count: int = 60, **changes: Any) -> Recorded:
    """A healthy run whose second half has ``changes``; callables get the step."""
    steps = [healthy(step) for step in range(1, count // 2 + 1)]
    for step in range(count // 2 + 1, count + 1):
        given = {key: value(step) if callable(value) else value for key, value in changes.items()}
        steps.append(healthy(step, **given))
    return Recorded(Path("gh200/telemetry.jsonl"), start={"max_steps": 100, "step": 0}, steps=steps)


def write_ranks(folder: Path, count: int) -> None:
    for rank in range(count):
        sink = JsonLines(folder / "gh200" / (f"telemetry.rank{rank}.jsonl" if rank else "telemetry.jsonl"))
        sink.write({"kind": "start", "time": START, "max_steps": 9, "ranks": 3, "rank": rank, "host": f"n{rank}"})
        for step in range(1, 6):
            sink.write(healthy(step, compute_seconds=0.5, data_wait_seconds=0.3 if rank == 2 else 0.01))
        sink.close()
