"""Reading from the store against page-cached files and plain memory copies; the index's size and speed."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner_gh200.bench.store_files import make_files, warm
from simpletuner_gh200.store.index import Index, IndexLayout, Rows, halves, write_index
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.staging import StagingRequest, stage

CACHED_BYTES = 8_000_000
"""A set of files that the processor's caches hold: then the way to the bytes is measured, not the memory behind it."""


def measure_reading(folder: Path, size: int, count: int, repeats: int) -> dict[str, Any]:
    """CPU time of one thread over files in random order: get the content, copy it once into a hot buffer.

    Twice: over a few files again and again, and over all of them, which no cache holds. There everything waits for the
    same memory, and what is left to win is the difference to a plain copy.
    """
    paths = make_files(folder, size, count)
    memory, _report = stage(StagingRequest(folder, verify="none"))
    dataset = StagedDataset(memory)
    memory.close()
    warm(paths)
    random.Random(7).shuffle(paths)
    few = paths[: max(1, CACHED_BYTES // size)]
    return {
        **_read_ratios(dataset, few * max(1, count // len(few)), size, repeats),
        "beyond_cache": _read_ratios(dataset, paths, size, repeats),
    }


def _read_ratios(dataset: StagedDataset, paths: list[str], size: int, repeats: int) -> dict[str, float]:
    places = {path: at for at, path in enumerate(dict.fromkeys(paths))}
    slab = np.frombuffer(b"".join(bytes(dataset.view(path) or b"") for path in places), np.uint8)
    hot = bytearray(size)
    hot_view, hot_array = memoryview(hot), np.frombuffer(hot, np.uint8)
    blocks = [slab[at * size : (at + 1) * size] for at in map(places.__getitem__, paths)]

    def view() -> None:
        for path in paths:
            found = dataset.view(path)
            assert found is not None
            hot_view[:] = found

    def local() -> None:
        for path in paths:
            with open(path, "rb") as file:
                hot_view[:] = file.read()

    def as_bytes() -> None:
        for path in paths:
            found = dataset.view(path)
            assert found is not None
            hot_view[:] = bytes(found)

    def memcpy() -> None:
        for block in blocks:
            np.copyto(hot_array, block)

    taken = _cpu_medians({"view": view, "local": local, "bytes": as_bytes, "memcpy": memcpy}, repeats)
    return {
        "view_vs_local": taken["local"] / taken["view"],
        "view_vs_memcpy": taken["memcpy"] / taken["view"],
        "bytes_vs_local": taken["local"] / taken["bytes"],
        "view_us": taken["view"] / len(paths) * 1e6,
        "local_us": taken["local"] / len(paths) * 1e6,
        "set_bytes": len(places) * size,
    }


def measure_index(keys: int, repeats: int) -> dict[str, float]:
    """Everything a process needs to look up: shared index, shared state, its own marks."""
    paths = [b"/data/set/%04d/image_%07d.jpg" % (number // 500, number) for number in range(keys)]
    rows = Rows.new(keys)
    for number, path in enumerate(paths):
        rows.key_low[number], rows.key_high[number] = halves(path)
    fd = write_index(rows)
    index = Index(fd, keys)
    os.close(fd)
    asked = random.Random(3).choices(paths, k=min(keys, 100_000))

    def look_up() -> None:
        for path in asked:
            index.find(path)

    taken = _cpu_medians({"lookup": look_up}, repeats)
    return {
        "bytes_per_key": IndexLayout(keys).nbytes / keys + 2,
        "lookup_us": taken["lookup"] / len(asked) * 1e6,
        "keys": keys,
    }


def _cpu_medians(candidates: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    for candidate in candidates.values():
        candidate()
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, candidate in candidates.items():
            began = time.thread_time()
            candidate()
            taken[name].append(time.thread_time() - began)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
