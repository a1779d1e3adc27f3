"""Unified caches: hits, batches, SimpleTuner's own caches over them, warm starts, and what is held."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner_gh200.bench.cache_simpletuner import measure_simpletuner
from simpletuner_gh200.bench.filling import make_packs, new_cache, take_packs
from simpletuner_gh200.bench.samples import make_cache_files, read_all
from simpletuner_gh200.bench.sharing import measure_cache
from simpletuner_gh200.bench.suite import Suite, measure, one_torch_thread
from simpletuner_gh200.held.batch import assemble, same_tensor
from simpletuner_gh200.held.buffers import PARALLEL_FROM, BufferPool
from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.caches import Wanted, opened
from simpletuner_gh200.held.fill import Filler

SHAPES = {"32KB": (4, 64, 64), "512KB": (16, 128, 128)}
"""Of bfloat16 latents."""
COUNTS = {"32KB": 2048, "512KB": 512}
QUICK_COUNTS = {"32KB": 64, "512KB": 32}
BATCH = 16


def measure_caches(quick: bool, _samples: int | None) -> dict[str, Any]:
    counts, repeats = (QUICK_COUNTS, 1) if quick else (COUNTS, 7)
    result: dict[str, Any] = {"batch16": {}, "hit": {}}
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name:
        folder = Path(name)
        for size in SHAPES:
            result["batch16"][size], result["hit"][size] = measure_memory(folder / size, size, counts[size], repeats)
        result["warm_start"] = measure_warm_start(folder / "warm", 16 if quick else 1024, repeats)
        result |= measure_cache(folder / "sharing", 16 if quick else 512)
        result["simpletuner"] = measure_simpletuner(folder / "simpletuner", 16 if quick else 512, 1 if quick else 5)
    return result


def measure_memory(folder: Path, size: str, count: int, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(batch16, hit) of one size."""
    paths = make_cache_files(folder, SHAPES[size], count)
    with opened([Wanted("latents", "vae", str(folder), look_for_nan=True)]) as caches, one_torch_thread():
        cache = caches["latents"]
        order = random.Random(3).sample(paths, len(paths))
        found = [cache.find(path) for path in order]
        blocks = [entry.payload for entry in found if entry is not None]  # of a resident slab, for the plain copy
        return _batches(cache, order, blocks, repeats), _hits(cache, order, blocks, repeats)


def _batches(cache: HeldCache, paths: list[str], blocks: list[Any], repeats: int) -> dict[str, Any]:
    import torch

    pool = BufferPool()
    batches = _in_batches(paths)
    some = batches[: max(len(batches) // 8, 1)]
    hot = np.empty((BATCH, blocks[0].nbytes), np.uint8)

    def memcpy() -> None:
        for at in range(0, len(blocks), BATCH):
            for row, block in zip(hot, blocks[at : at + BATCH], strict=False):
                np.copyto(row, block)

    def torch_load() -> None:
        for batch in some:
            torch.stack([torch.load(path, weights_only=True) for path in batch])

    _assemble(cache, batches, pool)
    subjects = {"ours": lambda: _assemble(cache, batches, pool), "memcpy": memcpy, "torch_load": torch_load}
    taken = measure(subjects, repeats=repeats)
    # Large batches are copied by several threads: then the wall clock rules.
    seconds = taken.wall if hot.nbytes >= PARALLEL_FROM else taken.thread
    return {
        "vs_torch_load": seconds["torch_load"] / len(some) * len(batches) / seconds["ours"],
        "vs_memcpy": seconds["memcpy"] / seconds["ours"],
    }


def _in_batches(paths: list[str]) -> list[list[str]]:
    return [paths[at : at + BATCH] for at in range(0, len(paths), BATCH)]


def _assemble(cache: HeldCache, batches: list[list[str]], pool: BufferPool) -> None:
    for batch in batches:
        entries = cache.find_all(batch)
        assert entries is not None
        leaves: Any = [entry.layout.single for entry in entries]
        assert same_tensor(leaves) is not None
        assemble(entries, leaves, pool)


def _hits(cache: HeldCache, paths: list[str], blocks: list[Any], repeats: int) -> dict[str, Any]:
    hot = np.empty(blocks[0].nbytes, np.uint8)

    def hit() -> None:
        for path in paths:
            cache.get(path)

    def memcpy() -> None:
        for block in blocks:
            np.copyto(hot, block)

    hit()
    seconds = measure({"hit": hit, "memcpy": memcpy}, repeats=repeats).thread
    return {"us": seconds["hit"] / len(paths) * 1e6, "vs_memcpy": seconds["memcpy"] / seconds["hit"]}


def measure_warm_start(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """``vs_pt_files``: the start without packs, which fills from SimpleTuner's files on as many threads.

    A start reads no payload of a pack; ``first_epoch_vs_pt_files`` compares both with every entry used once besides.
    """
    paths = make_cache_files(folder / "latents", SHAPES["512KB"], count)
    packs = make_packs(folder, paths)
    written = sorted(packs.folder.glob("*.pack"))

    def from_packs(cache: HeldCache) -> None:
        take_packs(packs, cache, count)

    def from_files(cache: HeldCache) -> None:
        Filler(cache).fill(paths, workers=os.cpu_count() or 1)

    def started(start: Callable[[HeldCache], None], *, used: bool = False) -> None:
        cache = new_cache()
        start(cache)
        if used:
            _assemble(cache, _in_batches(paths), BufferPool())
        cache.close()

    subjects = {
        "packs": lambda: started(from_packs),
        "read": lambda: read_all(written),
        "pt": lambda: started(from_files),
        "packs_used": lambda: started(from_packs, used=True),
        "pt_used": lambda: started(from_files, used=True),
    }
    seconds = measure(subjects, repeats=repeats).wall
    return {
        "first_epoch_vs_pt_files": seconds["pt_used"] / seconds["packs_used"],
        "vs_read_limit": seconds["read"] / seconds["packs"],
        "vs_pt_files": seconds["pt"] / seconds["packs"],
    }


SUITE = Suite(
    "cache",
    "Unified caches: hits, batches, SimpleTuner over them, warm starts, memory held.",
    measure_caches,
    needs_simpletuner=True,
)
