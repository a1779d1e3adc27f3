"""SimpleTuner's own caching pass over a folder of pictures, entered from the top, with and without our workers."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Encode = Callable[[Any], Any]
"""What the VAE makes of a batch of pixels."""

CROPPED = {"crop": True, "crop_style": "center", "crop_aspect": "square", "resolution": 512, "resolution_type": "pixel"}


@dataclass
class Images:
    """A data set: its folder, and what its entry says."""

    folder: Path
    config: dict[str, Any] = field(default_factory=lambda: dict(CROPPED))
    name: str = "bench"
    kind: str = "image"
    conditioning: tuple[str, ...] = ()
    """Data sets that follow this one's geometry."""
    scanned: bool = True
    """Whether SimpleTuner looks through it for metadata of its own."""


def free(pixels: Any) -> Any:
    """A VAE that costs nothing."""
    return pixels[:, :, ::8, ::8]


class CachingBench:
    """SimpleTuner's state for some data sets below ``folder``, which keeps their metadata, and their caches."""

    def __init__(self, folder: Path, sets: list[Images], encode: Encode = free, **sizes: Any) -> None:
        """``sizes``: options of SimpleTuner's ``VAECache``, such as vae_batch_size."""
        import torch
        from simpletuner.helpers.metadata.backends import base
        from simpletuner.helpers.training.state_tracker import StateTracker

        if hasattr(base, "Queue"):
            base.Queue = queue.SimpleQueue  # see seams/points/data_backends.py
        self.folder = folder
        self.batches: list[tuple[int, ...]] = []
        self._encode = encode
        self._sizes = sizes
        self._accelerator = SimpleNamespace(
            device=torch.device("cpu"),
            is_main_process=True,
            is_local_main_process=True,
            num_processes=1,
            process_index=0,
            wait_for_everyone=lambda: None,
        )
        folder.mkdir(parents=True, exist_ok=True)
        StateTracker.set_args(SimpleNamespace(output_dir=str(folder), **_ARGUMENTS))
        StateTracker.set_accelerator(self._accelerator)
        StateTracker.weight_dtype = torch.float32
        StateTracker.vae_dtype = torch.float32
        StateTracker.webhook_handler = None
        StateTracker.data_backends, StateTracker.all_image_files, StateTracker.all_vae_cache_files = {}, {}, {}
        StateTracker.aspect_resolution_map = {}
        self.model = _Model(self)
        StateTracker.set_model(self.model)
        self.caches = {images.name: self._cache(images) for images in sets}
        for images in sets:
            if images.conditioning:
                StateTracker.set_conditioning_datasets(images.name, list(images.conditioning))

    def encode(self, pixels: Any) -> Any:
        self.batches.append(tuple(pixels.shape))
        return self._encode(pixels)

    def _cache(self, images: Images) -> Any:
        from simpletuner.helpers.caching.vae import VAECache
        from simpletuner.helpers.data_backend.local import LocalDataBackend
        from simpletuner.helpers.metadata.backends.discovery import DiscoveryMetadataBackend
        from simpletuner.helpers.training.state_tracker import StateTracker

        name, place = images.name, str(images.folder)
        config = {"instance_data_dir": place, "dataset_type": images.kind, **CROPPED, **images.config}
        files = LocalDataBackend(self._accelerator, name)
        entry: dict[str, Any] = {"id": name, "config": config, "dataset_type": images.kind, "data_backend": files}
        StateTracker.data_backends[name] = {**entry, "instance_data_dir": place}
        metadata = DiscoveryMetadataBackend(
            id=name,
            instance_data_dir=place,
            cache_file=str(self.folder / f"buckets-{name}"),
            metadata_file=str(self.folder / f"metadata-{name}"),
            data_backend=files,
            accelerator=self._accelerator,
            batch_size=1,
            resolution=config["resolution"],
            resolution_type=config["resolution_type"],
        )
        StateTracker.data_backends[name].update(metadata_backend=metadata, sampler=None)
        StateTracker.set_data_backend_config(name, config)
        if images.scanned:
            metadata.refresh_buckets()
        else:
            paths = sorted(map(str, images.folder.iterdir()))
            metadata.aspect_ratio_bucket_indices = {"1.0": paths}
        cache = VAECache(
            id=name,
            dataset_type=images.kind,
            model=self.model,
            vae=self.model.vae,
            accelerator=self._accelerator,
            metadata_backend=metadata,
            image_data_backend=files,
            cache_data_backend=LocalDataBackend(self._accelerator, f"{name}-vae", compress_cache=True),
            instance_data_dir=place,
            cache_dir=str(self.folder / f"vae-{name}"),
            **self._sizes,
        )
        cache.webhook_handler = None
        cache.discover_all_files()
        cache.build_vae_cache_filename_map(all_image_files=StateTracker.get_image_files(data_backend_id=name))
        cache.discover_unprocessed_files()
        StateTracker.data_backends[name]["vaecache"] = cache
        return cache

    def run(self, pool: Any = None, ceiling: int = 1 << 32, **options: Any) -> float:
        """Seconds of the pass over every data set: stock's, or with a pool of workers."""
        from simpletuner_gh200.seams.features.caching.feature import VAE
        from simpletuner_gh200.seams.features.caching.session import Pass

        began = time.perf_counter()
        for cache in self.caches.values():
            if pool is None:
                cache.process_buckets()
            else:
                self.last = Pass(cache, sys.modules[VAE], pool, ceiling, **options)
                self.last.run(cache.process_buckets)
        return time.perf_counter() - began


class _Model:
    """As much of a model as the pass asks for."""

    MAXIMUM_CANVAS_SIZE = None

    def __init__(self, bench: CachingBench) -> None:
        import torch

        self._bench = bench
        self.vae = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"), config=SimpleNamespace())

    def get_transforms(self, dataset_type: str = "image") -> Any:
        from torchvision import transforms

        if dataset_type == "video":
            from simpletuner.helpers.models.common import VideoModelFoundation

            return VideoModelFoundation.get_transforms(self, dataset_type)
        return transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])

    def pre_vae_encode_transform_sample(self, pixels: Any) -> Any:
        return pixels

    def encode_cache_batch(self, _vae: Any, pixels: Any, metadata_entries: Any = None) -> Any:
        return self._bench.encode(pixels)

    def post_vae_encode_transform_sample(self, latents: Any) -> Any:
        return latents

    def scale_vae_latents_for_cache(self, latents: Any, _vae: Any) -> Any:
        return latents


_ARGUMENTS = {
    "model_family": "sdxl",
    "model_type": "lora",
    "aspect_bucket_alignment": 64,
    "aspect_bucket_rounding": 2,
    "aspect_bucket_worker_count": 2,
    "enable_multiprocessing": False,
    "disable_bucket_pruning": True,
    "ignore_missing_files": False,
    "vae_cache_ondemand": False,
    "allow_dataset_oversubscription": True,
    "metadata_update_interval": 3600,
    "framerate": 25,
    "seed": 1,
}
