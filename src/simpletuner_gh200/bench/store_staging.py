"""Staging and discovery against their references."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.store_files import EXTENSIONS, make_files, warm
from simpletuner_gh200.store.discovery import walk
from simpletuner_gh200.store.image_check import Verify
from simpletuner_gh200.store.staging import StagingRequest, stage


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
