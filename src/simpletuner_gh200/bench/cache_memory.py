"""Cached tensors from memory: single hits and batches of 16, against plain copies and against ``torch.load``."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner_gh200.cache.batch import assemble, same_tensor
from simpletuner_gh200.cache.buffers import BufferPool
from simpletuner_gh200.cache.copying import PARALLEL_FROM
from simpletuner_gh200.cache.service import Wanted, opened
from simpletuner_gh200.cache.table import Table

SHAPES = {"32KB": (4, 64, 64), "512KB": (16, 128, 128)}
"""Of bfloat16 latents."""

BATCH = 16


def make_latents(folder: Path, shape: tuple[int, ...], count: int) -> list[str]:
    """Cache files as SimpleTuner writes them, in one folder."""
    import torch

    folder.mkdir(parents=True)
    noise = torch.randn(count + 64, *shape[1:]).to(torch.bfloat16)
    paths = []
    for number in range(count):
        path = folder / f"latent_{number:05d}.pt"
        torch.save(noise[number : number + shape[0]].clone(), path)
        paths.append(str(path))
    return paths


def medians(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Median seconds, candidates interleaved; CPU time of this thread, or by another clock. torch gets one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    try:
        for _ in range(repeats):
            for name, candidate in candidates.items():
                started = clock()
                candidate()
                taken[name].append(clock() - started)
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


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
    seconds = medians({"ours": ours, "memcpy": memcpy, "torch_load": torch_load}, repeats=repeats, clock=clock)
    loaded = seconds["torch_load"] / max(len(batches) // 8, 1) * len(batches)
    return {
        "vs_torch_load": loaded / seconds["ours"],
        "vs_memcpy": seconds["memcpy"] / seconds["ours"],
        "samples_per_s": len(paths) / seconds["ours"],
    }


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
    seconds = medians({"hit": hit, "hit_and_read": hit_and_read, "memcpy": memcpy}, repeats=repeats)
    return {
        "us": seconds["hit"] / len(paths) * 1e6,
        "vs_memcpy": seconds["memcpy"] / seconds["hit"],
        "read_vs_memcpy": seconds["memcpy"] / seconds["hit_and_read"],
    }
