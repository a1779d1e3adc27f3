"""The in-memory dataset: discovery, staging, reading, index, sharing, and SimpleTuner's own pipeline over it."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from simpletuner_gh200.bench.samples import EXTENSIONS, SIZES, make_files, make_photographs, read_all
from simpletuner_gh200.bench.sharing import measure_dataset
from simpletuner_gh200.bench.suite import Suite, measure
from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.held.files import FileSegment, HeldFiles
from simpletuner_gh200.held.listing import list_files
from simpletuner_gh200.held.segment import PLAIN, SegmentWriter, key_of, words_of_keys
from simpletuner_gh200.held.staging import stage
from simpletuner_gh200.memory.mapping import create_memfd

COUNTS = {"400B": 20_000, "100KB": 2_000, "2MB": 100}
QUICK_COUNTS = {"400B": 200, "100KB": 20, "2MB": 4}
PIPELINE_BATCH = 16
EDGE = 320
CACHED_BYTES = 8_000_000
"""A set of files that the processor's caches hold: then the way to the bytes is measured, not the memory behind it."""


def measure_store(quick: bool, _samples: int | None) -> dict[str, Any]:
    counts, repeats = (QUICK_COUNTS, 1) if quick else (COUNTS, 7)
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name:
        folder = Path(name)
        return {
            "staging": {
                size: measure_staging(folder / f"stage-{size}", SIZES[size], counts[size], repeats) for size in SIZES
            },
            "walk": measure_walk(folder / "walk", counts["400B"], repeats),
            "read": {
                size: measure_reading(folder / f"read-{size}", SIZES[size], counts[size], repeats)
                for size in ("100KB", "2MB")
            },
            "index": measure_index(2_000 if quick else 1_000_000, repeats),
            "sharing": measure_dataset(folder / "sharing", SIZES["2MB"], 8 if quick else 540),
            "pipeline": measure_simpletuner(folder / "pipeline", 20 if quick else 2_000, 1 if quick else 5),
        }


def measure_staging(folder: Path, size: int, count: int, repeats: int) -> dict[str, Any]:
    """Wall time over warm files. Staging gives the page cache back, so files are warmed again before each turn.

    Memory of ours is held until its time is taken, as the reference holds its dict: giving back is not timed.
    """
    paths = make_files(folder, size, count)
    settings = InMemorySettings(verify="none")
    subjects: dict[str, Callable[[], object]] = {
        "limit": lambda: read_all(paths, size),
        "thread_lz4_dict": lambda: thread_lz4_dict(folder),
        "ours": lambda: stage(folder, settings)[0],
    }
    seconds = measure(subjects, repeats=repeats, before=lambda _name: read_all(paths)).wall
    return {
        "gb_per_s": size * count / seconds["ours"] / 1e9,
        "vs_read_limit": seconds["limit"] / seconds["ours"],
        "vs_thread_lz4_dict": seconds["thread_lz4_dict"] / seconds["ours"],
    }


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

    def rglob() -> int:
        return sum(path.stat().st_size for path in find_with_rglob(folder))

    found = list_files(folder)
    assert (found.files, found.size) == (count, rglob())
    seconds = measure({"rglob": rglob, "walk": lambda: list_files(folder)}, repeats=repeats).thread
    return {"vs_rglob": seconds["rglob"] / seconds["walk"]}


def measure_reading(folder: Path, size: int, count: int, repeats: int) -> dict[str, Any]:
    """CPU time of one thread over files in random order: get the content, copy it once into a hot buffer.

    Twice: over a few files again and again, and over all of them, which no cache holds. There everything waits for the
    same memory, and what is left to win is the difference to a plain copy.
    """
    paths = make_files(folder, size, count)
    dataset = HeldFiles.alone(stage(folder, InMemorySettings(verify="none"))[0])
    read_all(paths)
    random.Random(7).shuffle(paths)
    few = paths[: max(1, CACHED_BYTES // size)]
    return {
        **_read_ratios(dataset, few * max(1, count // len(few)), size, repeats),
        "beyond_cache": _read_ratios(dataset, paths, size, repeats),
    }


def _read_ratios(dataset: HeldFiles, paths: list[str], size: int, repeats: int) -> dict[str, float]:
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

    subjects = {"view": view, "local": local, "bytes": as_bytes, "memcpy": memcpy}
    for subject in subjects.values():
        subject()
    seconds = measure(subjects, repeats=repeats).thread
    return {
        "view_vs_local": seconds["local"] / seconds["view"],
        "view_vs_memcpy": seconds["memcpy"] / seconds["view"],
        "bytes_vs_local": seconds["local"] / seconds["bytes"],
    }


def measure_index(keys: int, repeats: int) -> dict[str, float]:
    """Everything a process needs to look up: rows that all ranks share, and its own dict of their keys."""
    paths = [f"/data/set/{number // 500:04d}/image_{number:07d}.jpg" for number in range(keys)]
    writer = SegmentWriter(create_memfd("index"), rows=PLAIN)
    rows = np.zeros(keys, PLAIN)
    words = words_of_keys([key_of(path) for path in paths])
    rows["key_low"], rows["key_high"] = words[:, 0], words[:, 1]
    writer.add(rows)
    writer.finish("[]")
    before = _resident()
    held = HeldFiles.alone(FileSegment.in_memory(writer.fd))
    size = _resident() - before
    wanted = random.Random(3).choices(paths, k=min(keys, 100_000))

    def look_up() -> None:
        for path in wanted:
            held.holds(path)

    look_up()
    seconds = measure({"look_up": look_up}, repeats=repeats).thread["look_up"]
    return {"bytes_per_key": size / keys, "lookup_us": seconds / len(wanted) * 1e6}


def _resident() -> int:
    """Bytes of this process's memory, shared ones included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def measure_simpletuner(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """Wall time of the scan of every file and of one pass of batched reading."""
    os.environ.setdefault("SIMPLETUNER_LOG_LEVEL", "ERROR")
    paths = make_photographs(folder, count, EDGE)
    dataset = HeldFiles.alone(stage(folder)[0])
    from simpletuner.helpers.data_backend.local import LocalDataBackend

    from simpletuner_gh200.seams.features.store.backend import backend_class

    local, ours = LocalDataBackend(accelerator=None, id="bench"), backend_class()(None, "bench", dataset)
    subjects = {"local": partial(_run, local, paths), "ours": partial(_run, ours, paths)}
    seconds = measure(subjects, repeats=repeats, before=lambda _name: read_all(paths)).wall
    return {"samples_per_s_vs_local": seconds["local"] / seconds["ours"]}


def _run(backend: Any, paths: list[str]) -> None:
    scanner = _scanner(backend)
    found: dict[str, Any] = {}
    for path in paths:
        scanner._process_for_bucket(path, {}, metadata_updates=found)
    for at in range(0, len(paths), PIPELINE_BATCH):
        keys, _images = backend.read_image_batch(paths[at : at + PIPELINE_BATCH])
        assert len(keys) == len(paths[at : at + PIPELINE_BATCH])
    assert len(found) == len(paths), "SimpleTuner's scan failed; see its log"


def _scanner(backend: Any) -> Any:
    """SimpleTuner's metadata backend with what its scan needs, and nothing written to the dataset."""
    from simpletuner.helpers.data_backend.dataset_types import DatasetType
    from simpletuner.helpers.metadata.backends.discovery import DiscoveryMetadataBackend
    from simpletuner.helpers.training.state_tracker import StateTracker

    size = {"resolution": 256, "resolution_type": "pixel"}
    unbounded = ("minimum_image_size", "minimum_aspect_ratio", "maximum_aspect_ratio")
    no_video = ("minimum_num_frames", "maximum_num_frames", "num_frames")
    entry = {"id": "bench", "crop": True, "crop_aspect": "square", "crop_style": "center", **size}
    StateTracker.set_args(SimpleNamespace(**size, aspect_bucket_alignment=8, aspect_bucket_rounding=2, output_dir="."))
    StateTracker.data_backends["bench"] = {"id": "bench", "config": entry}
    scanner = DiscoveryMetadataBackend.__new__(DiscoveryMetadataBackend)
    vars(scanner).update(dict.fromkeys((*unbounded, *no_video)), **size, id="bench", data_backend=backend)
    vars(scanner).update(
        dataset_type=DatasetType.IMAGE, delete_unwanted_images=False, dataset_config=entry, instance_data_dir=""
    )
    return scanner


SUITE = Suite(
    "store",
    "The in-memory dataset: staging, reading, sharing, and SimpleTuner's pipeline over it.",
    measure_store,
    needs_simpletuner=True,
)
