"""Unified caches: hits, batches, SimpleTuner's own caches over them, warm starts, and what is held."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner_gh200.bench import sharing
from simpletuner_gh200.bench.cache_simpletuner import measure_simpletuner
from simpletuner_gh200.bench.samples import make_latents
from simpletuner_gh200.bench.suite import Suite, interleaved
from simpletuner_gh200.cache.batch import assemble, same_tensor
from simpletuner_gh200.cache.buffers import BufferPool
from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.copying import PARALLEL_FROM
from simpletuner_gh200.cache.fill import fill
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.service import Wanted, opened
from simpletuner_gh200.cache.table import Table

SHAPES = {"32KB": (4, 64, 64), "512KB": (16, 128, 128)}
"""Of bfloat16 latents."""
COUNTS = {"32KB": 2048, "512KB": 512}
QUICK_COUNTS = {"32KB": 64, "512KB": 32}
BATCH = 16
_HOT = 4 << 20


def measure(quick: bool) -> dict[str, Any]:
    counts, repeats = (QUICK_COUNTS, 1) if quick else (COUNTS, 7)
    result: dict[str, Any] = {"batch16": {}, "hit": {}}
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name:
        folder = Path(name)
        for size in SHAPES:
            batch, hit = measure_memory(folder / size, size, counts[size], repeats)
            result["batch16"][size], result["hit"][size] = batch, hit
        result["warm_start"] = measure_warm_start(folder / "warm", 16 if quick else 1024, repeats)
        shared = sharing.measure_cache(folder / "sharing", 16 if quick else 512)
        result["held_ratio"] = shared.pop("held_ratio")
        result["sharing"] = shared
        result["simpletuner"] = measure_simpletuner(folder / "simpletuner", 16 if quick else 512, 1 if quick else 5)
    return result


def measure_memory(folder: Path, size: str, count: int, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(batch16, hit) of one size."""
    paths = make_latents(folder, SHAPES[size], count)
    with opened([Wanted("latents", "vae", str(folder), look_for_nan=True)]) as tables:
        table = tables["latents"]
        order = random.Random(3).sample(paths, len(paths))
        return _batches(table, order, repeats), _hits(table, order, repeats)


def _blocks(table: Table, paths: list[str]) -> list[Any]:
    """The published bytes of every path: blocks of a resident slab, for the plain copy."""
    found = [table.find(path) for path in paths]
    return [entry.payload for entry in found if entry is not None]


def _batches(table: Table, paths: list[str], repeats: int) -> dict[str, Any]:
    import torch

    pool = BufferPool()
    batches = [paths[at : at + BATCH] for at in range(0, len(paths), BATCH)]
    blocks = _blocks(table, paths)
    hot = np.empty((BATCH, blocks[0].nbytes), np.uint8)

    def ours() -> None:
        for batch in batches:
            entries = table.find_all(batch)
            assert entries is not None
            leaves: Any = [entry.layout.single for entry in entries]
            assert same_tensor(leaves) is not None
            assemble(entries, leaves, pool)

    def memcpy() -> None:
        for at in range(0, len(blocks), BATCH):
            for row, block in zip(hot, blocks[at : at + BATCH], strict=False):
                np.copyto(row, block)

    def torch_load() -> None:
        for batch in batches[: max(len(batches) // 8, 1)]:
            torch.stack([torch.load(path, weights_only=True) for path in batch])

    ours()
    # Large batches are copied by several threads: then the wall clock rules.
    clock = time.perf_counter if hot.nbytes >= PARALLEL_FROM else time.thread_time
    candidates = {"ours": ours, "memcpy": memcpy, "torch_load": torch_load}
    seconds = _with_one_torch_thread(candidates, repeats=repeats, clock=clock)
    loaded = seconds["torch_load"] / max(len(batches) // 8, 1) * len(batches)
    return {
        "vs_torch_load": loaded / seconds["ours"],
        "vs_memcpy": seconds["memcpy"] / seconds["ours"],
        "samples_per_s": len(paths) / seconds["ours"],
    }


def _with_one_torch_thread(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Median seconds: CPU time of this thread, or by another clock."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return interleaved(candidates, repeats=repeats, clock=clock)
    finally:
        torch.set_num_threads(threads)


def _hits(table: Table, paths: list[str], repeats: int) -> dict[str, Any]:
    """``vs_memcpy`` is the hit itself; ``read_vs_memcpy`` also reads every byte of it once, into a hot buffer."""
    blocks = _blocks(table, paths)
    hot = np.empty(blocks[0].nbytes, np.uint8)

    def hit() -> None:
        for path in paths:
            table.get(path)

    def hit_and_read() -> None:
        import torch

        for path in paths:
            np.copyto(hot, table.get(path).view(torch.uint8).view(-1).numpy())

    def memcpy() -> None:
        for block in blocks:
            np.copyto(hot, block)

    hit_and_read()
    candidates = {"hit": hit, "hit_and_read": hit_and_read, "memcpy": memcpy}
    seconds = _with_one_torch_thread(candidates, repeats=repeats)
    return {
        "us": seconds["hit"] / len(paths) * 1e6,
        "vs_memcpy": seconds["memcpy"] / seconds["hit"],
        "read_vs_memcpy": seconds["memcpy"] / seconds["hit_and_read"],
    }


def measure_warm_start(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """``vs_pt_files``: the start without packs, which fills from SimpleTuner's files on as many threads.

    A start reads no payload of a pack; ``first_epoch_vs_pt_files`` compares both with every entry used once besides.
    """
    paths = make_latents(folder / "latents", SHAPES["512KB"], count)
    packs = PackFolder(folder / "packs")
    packs.make(str(folder))
    first = _table(count)
    fill(first, paths, workers=2)
    packs.save(first, paths)
    first.close()
    hot = bytearray(_HOT)

    def load(*, used: bool = False) -> None:
        table = _table(count)
        loaded = PackFolder(packs.folder).load(table, workers=os.cpu_count() or 1)
        assert loaded.entries == count, loaded
        _use(table, paths if used else [])
        table.close()

    def fill_from_files(*, used: bool = False) -> None:
        table = _table(count)
        fill(table, paths, workers=os.cpu_count() or 1)
        _use(table, paths if used else [])
        table.close()

    candidates = {
        "packs": load,
        "read": lambda: _read(packs.packs(), hot),
        "pt": fill_from_files,
        "torch_load": lambda: _load(paths),
        "packs_used": lambda: load(used=True),
        "pt_used": lambda: fill_from_files(used=True),
    }
    seconds = interleaved(candidates, repeats=repeats)
    return {
        "first_epoch_vs_pt_files": seconds["pt_used"] / seconds["packs_used"],
        "vs_read_limit": seconds["read"] / seconds["packs"],
        "vs_pt_files": seconds["pt"] / seconds["packs"],
        "vs_torch_load": seconds["torch_load"] / seconds["packs"],
        "gb_per_s": sum(path.stat().st_size for path in packs.packs()) / seconds["packs"] / 1e9,
    }


def _table(count: int) -> Table:
    return Table("warm", Control.create(count + 256, label="warm", shared=False), look_for_nan=True)


def _use(table: Table, paths: list[str]) -> None:
    pool = BufferPool()
    for at in range(0, len(paths), BATCH):
        entries = table.find_all(paths[at : at + BATCH])
        assert entries is not None
        leaves: Any = [entry.layout.single for entry in entries]
        assemble(entries, leaves, pool)


def _read(paths: list[Path], hot: bytearray) -> None:
    view = memoryview(hot)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        while os.readv(fd, [view]):
            pass
        os.close(fd)


def _load(paths: list[str]) -> None:
    """Every file through ``torch.load``, kept in memory, and nothing else."""
    import torch

    kept = [torch.load(path, weights_only=True, map_location="cpu") for path in paths]
    assert len(kept) == len(paths)


SUITE = Suite("cache", "Unified caches: hits, batches, SimpleTuner over them, warm starts, memory held.", measure)
