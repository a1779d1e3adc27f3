"""The in-memory dataset: discovery, staging, reading, index, sharing, and SimpleTuner's own pipeline over it."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner_gh200.bench import sharing
from simpletuner_gh200.bench.samples import EXTENSIONS, SIZES, make_files, warm
from simpletuner_gh200.bench.store_simpletuner import measure_simpletuner
from simpletuner_gh200.bench.suite import Suite, interleaved
from simpletuner_gh200.store.discovery import walk
from simpletuner_gh200.store.image_check import Verify
from simpletuner_gh200.store.index import Index, IndexLayout, Rows, halves, write_index
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.staging import StagingRequest, stage

COUNTS = {"400B": 20_000, "100KB": 2_000, "2MB": 100}
QUICK_COUNTS = {"400B": 200, "100KB": 20, "2MB": 4}
CACHED_BYTES = 8_000_000
"""A set of files that the processor's caches hold: then the way to the bytes is measured, not the memory behind it."""


def measure(quick: bool) -> dict[str, Any]:
    counts, repeats = (QUICK_COUNTS, 1) if quick else (COUNTS, 7)
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name:
        folder = Path(name)
        result: dict[str, Any] = {
            "staging": {
                size: measure_staging(folder / f"stage-{size}", SIZES[size], counts[size], repeats) for size in SIZES
            },
            "walk": measure_walk(folder / "walk", counts["400B"], repeats),
            "read": {
                size: measure_reading(folder / f"read-{size}", SIZES[size], counts[size], repeats)
                for size in ("100KB", "2MB")
            },
            "index": measure_index(2_000 if quick else 1_000_000, repeats),
            "sharing": sharing.measure_dataset(folder / "sharing", SIZES["2MB"], 8 if quick else 540),
        }
        result["pipeline"] = measure_simpletuner(folder / "pipeline", 20 if quick else 2_000, 1 if quick else 5)
    return result


def measure_staging(folder: Path, size: int, count: int, repeats: int) -> dict[str, Any]:
    """Wall time over warm files. Staging gives the page cache back, so files are warmed again before each turn.

    The ``cpu_`` ratios count the CPU time of all threads instead: less honest about parallelism, but the only ones
    that mean something on a machine that is busy with other work.
    """
    paths = make_files(folder, size, count)
    candidates: dict[str, Callable[[], object]] = {
        "limit": lambda: read_limit(paths, size),
        "thread_lz4_dict": lambda: thread_lz4_dict(folder),
        "ours": lambda: _stage(folder, "none"),
        "ours_header": lambda: _stage(folder, "header"),
    }
    wall: dict[str, list[float]] = {name: [] for name in candidates}
    cpu: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, candidate in candidates.items():
            warm(paths)
            began, began_cpu = time.perf_counter(), time.process_time()
            kept = candidate()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - began_cpu)
            if isinstance(kept, ExitStack):
                kept.close()
            del kept
    median = {name: statistics.median(seconds) for name, seconds in wall.items()}
    work = {name: statistics.median(seconds) for name, seconds in cpu.items()}
    return {
        "gb_per_s": size * count / median["ours"] / 1e9,
        "files_per_s": count / median["ours"],
        "vs_read_limit": median["limit"] / median["ours"],
        "vs_thread_lz4_dict": median["thread_lz4_dict"] / median["ours"],
        "cpu_vs_read_limit": work["limit"] / work["ours"],
        "cpu_vs_thread_lz4_dict": work["thread_lz4_dict"] / work["ours"],
        "read_limit_gb_per_s": size * count / median["limit"] / 1e9,
        "header": {
            "gb_per_s": size * count / median["ours_header"] / 1e9,
            "vs_read_limit": median["limit"] / median["ours_header"],
            "vs_thread_lz4_dict": median["thread_lz4_dict"] / median["ours_header"],
        },
    }


def _stage(folder: Path, verify: Verify) -> ExitStack:
    """Until this is closed the memory is held, as the reference holds its dict: giving back is not timed."""
    memory, _report = stage(StagingRequest(folder, verify=verify, workers=os.cpu_count() or 1))
    held = ExitStack()
    held.callback(memory.close)
    return held


def read_limit(paths: list[str], size: int) -> None:
    """os.open + os.readinto of every file into one hot buffer (readv before Python 3.14)."""
    buffer = memoryview(bytearray(size))
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.readv(fd, [buffer])
        os.close(fd)


def find_with_rglob(folder: Path) -> list[Path]:
    return [path for ending in EXTENSIONS for path in folder.rglob(f"*.{ending}")]


def thread_lz4_dict(folder: Path) -> dict[Path, bytes]:
    """The earlier system's way: a task per file, read, lz4.frame, into a dict under a lock."""
    import lz4.frame

    held: dict[Path, bytes] = {}
    lock = threading.Lock()

    def load(path: Path) -> None:
        packed = lz4.frame.compress(path.read_bytes())
        with lock:
            held[path] = packed

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(load, find_with_rglob(folder)))
    return held


def measure_walk(folder: Path, count: int, repeats: int) -> dict[str, float]:
    """Discovery with sizes, single-threaded: CPU time."""
    make_files(folder, 400, count)
    taken: dict[str, list[float]] = {"rglob": [], "walk": []}
    for _ in range(repeats):
        began = time.thread_time()
        sizes = sum(path.stat().st_size for path in find_with_rglob(folder))
        taken["rglob"].append(time.thread_time() - began)
        began = time.thread_time()
        found = walk(folder)
        taken["walk"].append(time.thread_time() - began)
        assert (found.files, found.size) == (count, sizes)
    rglob, ours = statistics.median(taken["rglob"]), statistics.median(taken["walk"])
    return {"vs_rglob": rglob / ours, "files_per_s": count / ours}


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
    """CPU seconds of this thread; every candidate has run once before it counts."""
    for candidate in candidates.values():
        candidate()
    return interleaved(candidates, repeats=repeats, clock=time.thread_time)


SUITE = Suite("store", "The in-memory dataset: staging, reading, sharing, and SimpleTuner's pipeline over it.", measure)
