"""Time to the first step: real starts against stock SimpleTuner's, and the parts of which ours consist."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.start_fill import (
    COUNTS,
    KINDS,
    STEPS,
    measure_fill,
    measure_packs,
    measure_scaling,
    measure_step_slowdown,
)
from simpletuner_gh200.bench.start_runs import RunServer, StartTimes
from simpletuner_gh200.bench.suite import Suite
from simpletuner_gh200.demo.project import Project, dataset_list, training_config
from simpletuner_gh200.demo.run import write_project_in_subprocess
from simpletuner_gh200.store.staging import StagingRequest, stage

SAMPLES = 2000
QUICK_SAMPLES = 8
REPEATS = 3
SIDE = 72

CACHES = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}
VARIANTS: dict[str, dict[str, Any]] = {"packs": {}, "no_packs": {}, "lazy": {"fill": "lazy"}}
"""What of ``cache_config`` differs; all of them with in-memory data. Without packs: none at its start."""


def measure(quick: bool) -> dict[str, Any]:
    return measure_samples(quick, QUICK_SAMPLES if quick else SAMPLES)


def measure_samples(quick: bool, samples: int) -> dict[str, Any]:
    repeats = 1 if quick else REPEATS
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name:
        folder = Path(name)
        fills = {
            kind: measure_fill(folder / kind, kind, 8 if quick else COUNTS[kind], 1 if quick else 5) for kind in KINDS
        }
        result: dict[str, Any] = {
            "fill": {**fills, "scaling": measure_scaling(folder / "scaling", 8 if quick else 1500, repeats)},
            "packs": measure_packs(folder / "packs", 16 if quick else 4000, repeats),
            "step_slowdown": _slowdown(folder / "steps", quick, repeats),
        }
        result |= _starts(folder / "project", samples, repeats)
    return result


def _slowdown(folder: Path, quick: bool, repeats: int) -> float:
    return measure_step_slowdown(folder, 64 if quick else 1000, repeats, 2 if quick else STEPS)


def _starts(folder: Path, samples: int, repeats: int) -> dict[str, Any]:
    """``start``, ``captions`` and ``staging``: what a project of so many images takes to start."""
    project = Project(folder, steps=1)
    installed = importlib.util.find_spec("simpletuner") is not None
    if installed:
        write_project_in_subprocess(project, {}, {})
    write_samples(project.images, samples)
    found: dict[str, Any] = {"staging": {"files_per_s": _staging(project.images, repeats)}, "samples": samples}
    if not installed:
        nothing = {"vs_stock": None, "first_step_vs_stock": None}
        return {**found, "start": dict.fromkeys(VARIANTS, nothing), "captions": {"vs_stock": None}}
    with RunServer() as server:
        times = _run_all(project, server, repeats)
    stock = times["stock"]
    return {
        **found,
        "start": {
            name: {
                "vs_stock": _ratio(times[name], stock, "data"),
                "first_step_vs_stock": _ratio(times[name], stock, "first_step"),
                "cpu_vs_stock": _ratio(times[name], stock, "data_cpu"),
                "data_s": statistics.median(one.data for one in times[name]),
            }
            for name in VARIANTS
        },
        "stock": {"data_s": statistics.median(one.data for one in stock)},
        "captions": {"vs_stock": _ratio(times["packs"], stock, "captions")},
    }


def _ratio(ours: list[StartTimes], stock: list[StartTimes], what: str) -> float:
    """Of neighbours: each of ours to the stock run of its round, so that what slows the machine slows both."""
    ratios = [float(getattr(a, what) / getattr(b, what)) for a, b in zip(ours, stock, strict=True)]
    return statistics.median(ratios)


def _run_all(project: Project, server: RunServer, repeats: int) -> dict[str, list[StartTimes]]:
    def run(name: str, block: dict[str, Any] | None) -> StartTimes:
        shutil.rmtree(project.output, ignore_errors=True)
        data = {} if block is None else {"type": "in_memory", "in_memory": {}}
        project.datasets.write_text(json.dumps(dataset_list(project, data)), encoding="utf-8")
        config = {**training_config(project), "checkpoint_step_interval": 1_000_000}
        if block is not None:
            config["cache_config"] = {**CACHES, **block}
        project.config.write_text(json.dumps(config), encoding="utf-8")
        return server.run(project.config, project.folder / f"{name}.log", stock=block is None)

    run("caches", None)  # SimpleTuner fills its own caches
    packed, unpacked = str(project.folder / "packed"), project.folder / "unpacked"
    run("packing", {"fill": "start", "cache_dir": packed})
    times: dict[str, list[StartTimes]] = {"stock": [], **{name: [] for name in VARIANTS}}
    for _ in range(repeats):
        times["stock"].append(run("stock", None))
        for name, differs in VARIANTS.items():
            shutil.rmtree(unpacked, ignore_errors=True)
            cache_dir = packed if name == "packs" else str(unpacked)
            times[name].append(run(name, {**differs, "cache_dir": cache_dir}))
    return times


def write_samples(folder: Path, count: int) -> None:
    """Small captioned images, no two alike."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = folder / f"sample_{number:06d}.png"
        colour = (number % 256, number // 256 % 256, number * 7 % 256)
        path.with_suffix(".txt").write_text(f"a plain picture, number {number}", encoding="utf-8")
        Image.new("RGB", (SIDE, SIDE), colour).save(path)


def _staging(images: Path, repeats: int) -> float:
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        memory, report = stage(StagingRequest(images, workers=os.cpu_count() or 1, give_back_page_cache=False))
        rates.append(report.files / (time.perf_counter() - began))
        memory.close()
    return statistics.median(rates)


SUITE = Suite(
    "start",
    "Time to the first step against stock SimpleTuner; filling, packs and captions by themselves.",
    measure,
    measure_samples,
)
