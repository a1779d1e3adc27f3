"""The caching pass against stock SimpleTuner's: decoding alone, beside a slow VAE, and a whole cold start."""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.caching_simpletuner import CachingBench, Encode, Images, free
from simpletuner_gh200.bench.runs import FIRST_STEP, RunServer, Timed
from simpletuner_gh200.bench.samples import make_photographs
from simpletuner_gh200.bench.suite import Suite
from simpletuner_gh200.caching.workers import WorkerPool
from simpletuner_gh200.demo.project import DemoProject, write_project_in_subprocess
from simpletuner_gh200.memory.host import usable_cores

EDGES = {"1MP": 1024, "9MP": 3000}
COUNTS = {"1MP": 96, "9MP": 40}
START_SAMPLES, QUICK_SAMPLES = 400, 8
REPEATS = 3


def measure_caching(quick: bool, samples: int | None) -> dict[str, Any]:
    quiet = {"TQDM_DISABLE": "1", "SIMPLETUNER_LOG_LEVEL": "ERROR"}
    os.environ.update({name: os.environ.setdefault(name, value) for name, value in quiet.items()})
    importlib.import_module("simpletuner.helpers.caching.vae")  # else the first scan pays for it
    repeats = 1 if quick else REPEATS
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name, Workers(usable_cores()) as workers:
        passes, found = {}, {}
        for size, edge in EDGES.items():
            photographs = Path(name, size)
            make_photographs(photographs, QUICK_SAMPLES if quick else COUNTS[size], edge)
            passes[size] = Passes(Path(name, f"{size}-state"), photographs)
            found[size] = {**passes[size].compared(workers, repeats), "scan_images_per_s": passes[size].scanned}
        large = passes["9MP"]
        counts = (1, workers.most)
        rounds = [[large.timed(workers.pool(count), free)[0] for count in counts] for _round in range(repeats)]
        together = statistics.median(by_all for _by_one, by_all in rounds)
        slow = partial(_sleeping, together / large.pictures)
        overlap = large.compared(workers, repeats, slow)["vs_stock"]
        return {
            "passes": found,
            "overlap": {"vs_stock": overlap},
            "scaling": statistics.median(by_one / by_all for by_one, by_all in rounds),
            "peak_memory_bytes": large.most,
            **_cold_start(Path(name, "project"), samples or (QUICK_SAMPLES if quick else START_SAMPLES), repeats),
        }


def _sleeping(seconds: float, pixels: Any) -> Any:
    """A VAE that takes time and no core, as one on a GPU does."""
    time.sleep(seconds * len(pixels))
    return free(pixels)


class Workers:
    """Pools by their size, started once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._pools: dict[int, WorkerPool] = {}

    def pool(self, count: int) -> WorkerPool:
        from simpletuner_gh200.seams.features.caching.feature import TARGET

        if count not in self._pools:
            self._pools[count] = made = WorkerPool(TARGET, count)
            for worker in [made.worker() for _ in range(count)]:
                made.give_back(worker)
        return self._pools[count]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()


class Passes:
    """One folder of pictures, looked through once; every pass starts from there, and encodes all of it."""

    def __init__(self, state: Path, photographs: Path) -> None:
        self._state, self._kept = state, state.with_name(f"{state.name}-kept")
        self._images = [Images(photographs)]
        began = time.perf_counter()
        CachingBench(self._kept, self._images)
        self.pictures = len(list(photographs.iterdir()))
        self.scanned = self.pictures / (time.perf_counter() - began)
        """Pictures per second of SimpleTuner's own scan."""
        self.most = 0

    def compared(self, workers: Workers, repeats: int, encode: Encode = free) -> dict[str, float]:
        runs = [(self.timed(None, encode), self.timed(workers.pool(workers.most), encode)) for _round in range(repeats)]
        return {
            "images_per_s": self.pictures / statistics.median(ours for _stock, (ours, _cpu) in runs),
            "vs_stock": statistics.median(stock / ours for (stock, _), (ours, _cpu) in runs),
            "cpu_vs_stock": statistics.median(cpu / stock for (_, stock), (_ours, cpu) in runs),
        }

    def timed(self, pool: WorkerPool | None, encode: Encode) -> tuple[float, float]:
        """Seconds of one pass, and CPU seconds of all processes that were at it."""
        shutil.rmtree(self._state, ignore_errors=True)
        shutil.copytree(self._kept, self._state)
        bench = CachingBench(self._state, self._images, encode)
        began = _cpu(pool)
        seconds = bench.run(pool)
        if pool is not None:
            self.most = max(self.most, bench.last.most)
        return seconds, _cpu(pool) - began


def _cpu(pool: WorkerPool | None) -> float:
    return time.process_time() + (pool.cpu_seconds() if pool is not None else 0.0)


def _cold_start(folder: Path, samples: int, repeats: int) -> dict[str, Any]:
    """From the start of a run whose caches are empty to its first step; SimpleTuner is imported before."""
    project = DemoProject(folder, steps=1)
    write_project_in_subprocess(project, {}, {})
    make_photographs(project.images, samples, EDGES["1MP"], captions=True)

    def run(server: RunServer, name: str, cache_config: dict[str, Any] | None) -> Timed:
        shutil.rmtree(project.folder / "cache", ignore_errors=True)
        for index in project.images.glob("aspect_ratio_bucket_*"):
            index.unlink()
        return server.start(project, name, (FIRST_STEP,), cache_config)

    unified = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "caching": "parallel"}
    first: Callable[[Timed], float] = lambda timed: timed.wall[FIRST_STEP]  # noqa: E731 - the one number of a run
    with RunServer() as server:
        rounds = [(run(server, "stock", None), run(server, "ours", unified)) for _round in range(repeats)]
    return {
        "first_step_vs_stock": statistics.median(first(ours) / first(stock) for stock, ours in rounds),
        "first_step_s": statistics.median(first(ours) for _stock, ours in rounds),
        "samples": samples,
    }


SUITE = Suite(
    "caching",
    "The caching pass against stock SimpleTuner's: decoding, overlap with the VAE, a whole cold start.",
    measure_caching,
    takes_samples=True,
    needs_simpletuner=True,
)
