"""SimpleTuner's own metadata scan and image reading, from memory against page-cached and cold files."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simpletuner_gh200.bench.samples import chill, make_jpegs, warm
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.staging import StagingRequest, stage

BATCH = 16


def measure_simpletuner(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    if importlib.util.find_spec("simpletuner") is None:
        return {"samples_per_s_vs_local": None, "skipped": "SimpleTuner is not installed"}
    os.environ.setdefault("SIMPLETUNER_LOG_LEVEL", "ERROR")
    paths = make_jpegs(folder, count)
    memory, report = stage(StagingRequest(folder, workers=os.cpu_count() or 1))
    dataset = StagedDataset(memory)
    memory.close()
    backends = {"local": _local(), "ours": _ours(dataset)}
    taken: dict[str, list[float]] = {"local": [], "ours": [], "cold": []}
    for _ in range(repeats):
        for name, backend in backends.items():
            warm(paths)
            taken[name].append(_run(backend, paths))
        chill(paths)
        taken["cold"].append(_run(backends["local"], paths))
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return {
        "samples_per_s_vs_local": median["local"] / median["ours"],
        "samples_per_s_vs_cold": median["cold"] / median["ours"],
        "samples_per_s": count / median["ours"],
        "staging_s": report.seconds,
        "images": count,
    }


def _local() -> Any:
    from simpletuner.helpers.data_backend.local import LocalDataBackend

    return LocalDataBackend(accelerator=None, id="bench")


def _ours(dataset: StagedDataset) -> Any:
    from simpletuner_gh200.seams.features.store.backend import backend_class

    return backend_class()(None, "bench", dataset)


def _run(backend: Any, paths: list[str]) -> float:
    """Wall seconds of the scan of every file and of one pass of batched reading."""
    scanner = _scanner(backend)
    found: dict[str, Any] = {}
    began = time.perf_counter()
    for path in paths:
        scanner._process_for_bucket(path, {}, metadata_updates=found)
    for at in range(0, len(paths), BATCH):
        keys, _images = backend.read_image_batch(paths[at : at + BATCH])
        assert len(keys) == len(paths[at : at + BATCH])
    seconds = time.perf_counter() - began
    assert len(found) == len(paths), "SimpleTuner's scan failed; see its log"
    return seconds


def _scanner(backend: Any) -> Any:
    """SimpleTuner's metadata backend with what its scan needs, and nothing written to the dataset."""
    from simpletuner.helpers.data_backend.dataset_types import DatasetType
    from simpletuner.helpers.metadata.backends.discovery import DiscoveryMetadataBackend
    from simpletuner.helpers.training.state_tracker import StateTracker

    StateTracker.set_args(
        SimpleNamespace(
            resolution=256, resolution_type="pixel", aspect_bucket_alignment=8, aspect_bucket_rounding=2, output_dir="."
        )
    )
    entry = {"id": "bench", "crop": True, "crop_aspect": "square", "crop_style": "center", "resolution": 256}
    StateTracker.data_backends["bench"] = {"id": "bench", "config": {**entry, "resolution_type": "pixel"}}
    scanner = DiscoveryMetadataBackend.__new__(DiscoveryMetadataBackend)
    scanner.__dict__.update(
        id="bench",
        data_backend=backend,
        dataset_type=DatasetType.IMAGE,
        delete_unwanted_images=False,
        minimum_image_size=None,
        minimum_aspect_ratio=None,
        maximum_aspect_ratio=None,
        resolution=256,
        resolution_type="pixel",
        minimum_num_frames=None,
        maximum_num_frames=None,
        num_frames=None,
        dataset_config=entry,
        instance_data_dir="",
    )
    return scanner
