"""Filling by itself: how near it comes to what reading and unpacking cost alone, and what it costs a training step."""

from __future__ import annotations

import gzip
import io
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from isal import isal_zlib

from simpletuner_gh200.bench.samples import make_cache_files, training_step
from simpletuner_gh200.bench.suite import measure, one_torch_thread
from simpletuner_gh200.held.bulk import TAKEN
from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.fill import Filler
from simpletuner_gh200.held.pack_place import PackPlace
from simpletuner_gh200.held.packs import PackFolder
from simpletuner_gh200.held.tensor_files import FileTaker, Shapes
from simpletuner_gh200.memory.background import BackgroundJob, Effort, Pace

KINDS = {"gzip_20KB": (10 * 1024, True), "zip_128KB": (64 * 1024, False), "zip_512KB": (256 * 1024, False)}
"""Of bfloat16 tensors: numbers in each, and whether the file is gzipped."""
COUNTS = {"gzip_20KB": 1500, "zip_128KB": 600, "zip_512KB": 200}
SMALL = (KINDS["gzip_20KB"][0],)
STEPS = 20


def measure_fill(folder: Path, kind: str, count: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of one thread.

    ``vs_limit`` compares like with like: files taken apart and checked, kept by neither side. ``held_vs_limit`` is all
    of filling: it also puts every byte into fresh memory, which for large entries costs more than all the rest, and
    which the limit leaves out.
    """
    numbers, gzipped = KINDS[kind]
    paths = make_cache_files(folder, (numbers,), count, gzipped=gzipped)
    some = paths[: max(count // 4, 1)]
    shapes = Shapes()
    _take_apart(paths[:1], shapes)  # the pickle is understood once in a cache of thousands of files
    subjects = {
        "limit": lambda: _limit(paths, gzipped),
        "taken": lambda: _take_apart(paths, shapes),
        "filled": lambda: _fill(paths, 1),
        "torch_load": lambda: _torch_load(some, gzipped),
    }
    with one_torch_thread():
        seconds = measure(subjects, repeats=repeats).cpu
    return {
        "vs_limit": seconds["limit"] / seconds["taken"],
        "held_vs_limit": seconds["limit"] / seconds["filled"],
        "vs_torch_load": seconds["torch_load"] * count / len(some) / seconds["filled"],
    }


def measure_scaling(folder: Path, count: int, repeats: int) -> float:
    """Wall time of filling with one thread against two."""
    paths = make_cache_files(folder, SMALL, count, gzipped=True)
    seconds = measure({"one": lambda: _fill(paths, 1), "two": lambda: _fill(paths, 2)}, repeats=repeats).wall
    return seconds["one"] / seconds["two"]


def make_packs(folder: Path, paths: list[str]) -> PackFolder:
    """Of the cache files at ``paths``, below ``folder``."""
    packs = PackFolder(folder / "packs", "bench")
    PackPlace.make(packs.folder, str(folder))
    cache = new_cache()
    Filler(cache).fill(paths, workers=2)
    packs.save(cache)
    cache.close()
    return packs


def take_packs(packs: PackFolder, cache: HeldCache, count: int) -> None:
    """As a start does: all of them taken in and checked."""
    again = PackFolder(packs.folder, "bench")
    for segment in again.open_all():
        cache.shelf.add(segment)
    again.recognise()
    assert again.report()["entries"] == count, again.report()


def measure_packs(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """CPU time per entry of 1 KB."""
    packs = make_packs(folder, make_cache_files(folder / "files", (512,), count, gzipped=True))

    def load() -> None:
        cache = new_cache()
        take_packs(packs, cache, count)
        cache.close()

    return {"us_per_entry": measure({"load": load}, repeats=repeats).cpu["load"] / count * 1e6}


def measure_step_slowdown(folder: Path, count: int, repeats: int, steps: int = STEPS) -> float:
    """How much longer a step of the demo's UNet on the CPU takes while a cache is filled in the background."""
    step = training_step(side=16)
    paths = make_cache_files(folder, SMALL, count, gzipped=True)
    filling: list[BackgroundJob] = []

    def alone() -> None:
        for _ in range(steps):
            step()

    def filled() -> object:
        alone()
        return SimpleNamespace(close=filling.pop().stop)

    def before(name: str) -> None:
        if name == "filled":
            filling.append(_filling(paths))

    seconds = measure({"alone": alone, "filled": filled}, repeats=repeats, before=before).wall
    return seconds["filled"] / seconds["alone"] - 1


def _filling(paths: list[str]) -> BackgroundJob:
    """Filling in the background as a run does it, again and again until it is stopped."""
    begun = threading.Event()

    def work(pace: Pace, effort: Effort) -> None:
        while not pace.ended:
            cache = new_cache()
            begun.set()
            Filler(cache).fill(paths, workers=effort.threads, pace=pace)
            cache.close()

    job = BackgroundJob(work, name="gh200-bench-fill")
    job.start()
    begun.wait()
    return job


def _limit(paths: list[str], gzipped: bool) -> None:
    """Read into one hot buffer, inflate where that is needed, CRC-32."""
    hot = memoryview(bytearray(1 << 20))
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        content: Any = hot[: os.readv(fd, [hot])]
        os.close(fd)
        if gzipped:
            content = isal_zlib.decompress(content, 31, 1 << 15)
        isal_zlib.crc32(content)


def _take_apart(paths: list[str], shapes: Shapes) -> None:
    taker, at, some = FileTaker(shapes, look_for_nan=True), 0, 16
    while at < len(paths):
        taken = taker.take(paths[at : at + some])
        assert taker.counts[TAKEN] == len(taken)
        at, some = at + len(taken), min(2 * len(taken), 256)


def _torch_load(paths: list[str], gzipped: bool) -> None:
    import torch

    for path in paths:
        content = Path(path).read_bytes()
        torch.load(io.BytesIO(gzip.decompress(content) if gzipped else content), weights_only=True)


def _fill(paths: list[str], workers: int) -> None:
    cache = new_cache()
    Filler(cache).fill(paths, workers=workers)
    assert cache.statistics.published == len(paths), cache.report()
    cache.close()


def new_cache() -> HeldCache:
    return HeldCache.alone("bench", look_for_nan=True)
