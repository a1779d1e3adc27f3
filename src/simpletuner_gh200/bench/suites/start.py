"""Time to the first step: real starts against stock SimpleTuner's, and the parts of which ours consist."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench import filling
from simpletuner_gh200.bench.runs import FIRST_STEP, RunServer, Timed
from simpletuner_gh200.bench.suite import Suite, measure
from simpletuner_gh200.demo.project import DemoProject, write_project_in_subprocess, write_tiny_images
from simpletuner_gh200.held.staging import stage

SAMPLES = 2000
QUICK_SAMPLES = 8
REPEATS = 3

CACHES = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}
VARIANTS: dict[str, dict[str, Any]] = {"packs": {}, "no_packs": {}, "lazy": {"fill": "lazy"}}
"""What of ``cache_config`` differs; all of them with in-memory data. Without packs: none at its start."""

DATA_BEGINS, DATA_ENDS = "Loading data backend config", "Loading diffusion model"
CAPTIONS_BEGIN, CAPTIONS_END = "Collecting captions", "Completed processing"
MARKS = (DATA_BEGINS, CAPTIONS_BEGIN, CAPTIONS_END, DATA_ENDS, FIRST_STEP)


def measure_start(quick: bool, samples: int | None) -> dict[str, Any]:
    repeats = 1 if quick else REPEATS
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name:
        folder = Path(name)
        fills: dict[str, Any] = {
            kind: filling.measure_fill(folder / kind, kind, 8 if quick else count, 1 if quick else 5)
            for kind, count in filling.COUNTS.items()
        }
        fills["scaling"] = filling.measure_scaling(folder / "scaling", 8 if quick else 1500, repeats)
        count, steps = (64, 2) if quick else (1000, filling.STEPS)
        return {
            "fill": fills,
            "packs": filling.measure_packs(folder / "packs", 16 if quick else 4000, repeats),
            "step_slowdown": filling.measure_step_slowdown(folder / "steps", count, repeats, steps),
            **_starts(folder / "project", samples or (QUICK_SAMPLES if quick else SAMPLES), repeats),
        }


def _starts(folder: Path, samples: int, repeats: int) -> dict[str, Any]:
    """``start``, ``captions`` and ``staging``: what a project of so many images takes to start."""
    project = DemoProject(folder, steps=1)
    write_project_in_subprocess(project, {}, {})
    write_tiny_images(project.images, count=samples)
    files_per_s = _staging(project.images, repeats)
    with RunServer() as server:
        runs = _run_all(project, server, repeats)
    stock = runs["stock"]
    return {
        "staging": {"files_per_s": files_per_s},
        "samples": samples,
        "start": {
            name: {
                "vs_stock": ratio(runs[name], stock, data_phase),
                "first_step_vs_stock": ratio(runs[name], stock, lambda run: run.wall[FIRST_STEP]),
                "cpu_vs_stock": ratio(runs[name], stock, lambda run: run.cpu[DATA_ENDS] - run.cpu[DATA_BEGINS]),
            }
            for name in VARIANTS
        },
        "captions": {
            "vs_stock": ratio(runs["packs"], stock, lambda run: run.wall[CAPTIONS_END] - run.wall[CAPTIONS_BEGIN])
        },
    }


def data_phase(run: Timed) -> float:
    return run.wall[DATA_ENDS] - run.wall[DATA_BEGINS]


def ratio(ours: list[Timed], stock: list[Timed], seconds: Callable[[Timed], float]) -> float:
    """Of neighbours: each of ours to the stock run of its round, so that what slows the machine slows both."""
    return statistics.median(seconds(one) / seconds(other) for one, other in zip(ours, stock, strict=True))


def _run_all(project: DemoProject, server: RunServer, repeats: int) -> dict[str, list[Timed]]:
    def run(name: str, block: dict[str, Any] | None) -> Timed:
        return server.start(project, name, MARKS, None if block is None else {**CACHES, **block})

    run("caches", None)  # SimpleTuner fills its own caches
    packed, unpacked = str(project.folder / "packed"), project.folder / "unpacked"
    run("packing", {"fill": "start", "cache_dir": packed})
    runs: dict[str, list[Timed]] = {"stock": [], **{name: [] for name in VARIANTS}}
    for _ in range(repeats):
        runs["stock"].append(run("stock", None))
        for name, differs in VARIANTS.items():
            shutil.rmtree(unpacked, ignore_errors=True)
            cache_dir = packed if name == "packs" else str(unpacked)
            runs[name].append(run(name, {**differs, "cache_dir": cache_dir}))
    return runs


def _staging(images: Path, repeats: int) -> float:
    """Files per second."""
    seconds = measure({"stage": lambda: stage(images, give_back=False)[0]}, repeats=repeats).wall["stage"]
    return 2 * len(list(images.glob("*.png"))) / seconds


SUITE = Suite(
    "start",
    "Time to the first step against stock SimpleTuner; filling, packs and captions by themselves.",
    measure_start,
    takes_samples=True,
    needs_simpletuner=True,
)
