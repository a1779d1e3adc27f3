"""Unified-memory caches: SimpleTuner's cached tensors served from held memory, attached to its backend instances."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.blocks import CacheSettings, HintSettings, PrefetchSettings
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.held.batch import Delivery, DeviceDelivery, assemble
from simpletuner_gh200.held.buffers import BufferPool
from simpletuner_gh200.held.bulk import inflating_library
from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.caches import Caches
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.background import waits_for_first_step
from simpletuner_gh200.memory.driver.detect import current
from simpletuner_gh200.memory.lane import Copier, CudaLane
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.caches.backends import Route, ServedBackend, ServedGrounding
from simpletuner_gh200.seams.features.caches.batch_path import BatchPath
from simpletuner_gh200.seams.features.caches.found import FoundCache, find_caches
from simpletuner_gh200.seams.patch import Patches
from simpletuner_gh200.units import gib_to_bytes, parse_bytes
from simpletuner_gh200.upstream.features import ON

logger = logging.getLogger("simpletuner_gh200")

COLLATE = "simpletuner.helpers.training.collate"
ENABLE_PREFETCH = "gh200_optimizations.enable_prefetch"
TOLD = ("hits", "misses", "hit_rate", "batched", "fallbacks", "fill_seconds")
"""Of each cache in the records of telemetry."""


class CachesFeature(Feature):
    name = "caches"

    def __init__(self) -> None:
        self.batch_path: BatchPath | None = None
        self._caches: Caches | None = None
        self._patches = Patches()
        self._held: dict[int, HeldCache] = {}
        """By the identity of SimpleTuner's cache object."""
        self._copier: Any = None
        self._first_step = 0
        self._at_start: dict[str, int] = {}
        """Misses before training, by cache."""
        self._final: dict[str, Any] = {}
        self._slabs: SlabMaker | None = None

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        if settings.part(HintSettings).enable_uvm_hints is False and not _from_environment(settings):
            return "off"
        return "requested" if any(settings.part(CacheSettings).served().values()) else "off"

    def configured(self) -> None:
        on = self.runtime.feature_on(self.name)
        if on and self.settings.part(CacheSettings).hbm_limit_gb:
            raise FeatureUnavailable(
                "cache_config.hbm_limit_gb: device copies of text embeds are not made any more: a batch of them is "
                "joined on the host, and copied once",
                remedy="remove cache_config.hbm_limit_gb, or set it to 0",
            )
        if not on and self.settings.given(ENABLE_PREFETCH):
            logger.warning("gh200: enable_prefetch works on batches of unified caches, and none are on")

    def summary(self) -> dict[str, Any]:
        if self._final or self._caches is None:
            return self._final
        told = self._caches.report()
        for name, before in self._at_start.items():
            told[name]["misses_in_training"] = told[name]["misses"] - before
        return told

    # -- moments ---------------------------------------------------------------------------------------

    def data_ready(self, trainer: Any) -> None:
        settings = self.settings.part(CacheSettings)
        found = find_caches(settings.served())
        if not found:
            logger.warning("gh200: cache_config asks for unified_memory, but this run has no cache of that kind")
            return
        try:
            inflating_library()
        except FeatureUnavailable as missing:
            logger.warning("gh200: SimpleTuner's own caches are used: %s", missing)
            return
        self._caches = self._open(settings, found, _pack_folder(settings, trainer), _keep_free(trainer.config))
        self._attach(found)
        self._caches.fill(settings.fill, later=waits_for_first_step(len(os.sched_getaffinity(0))))
        self.batch_path = self._batch_path(found)

    def before_train(self, trainer: Any) -> None:
        self._first_step = int(trainer.state.get("global_step", 0))
        self._at_start = {name: cache.statistics.misses for name, cache in self._all().items()}

    def rebuild_cache(self, cache: Any) -> None:
        held = self._held.get(id(cache))
        if held is not None and self._caches is not None:
            self._caches.drop(held.name)

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        if self._caches is not None and int(trainer.state.get("global_step", 0)) > self._first_step:
            self._caches.go_on()
        if self._copier is not None:
            # A cache that was rebuilt copies no more: what its last copies read would stay held.
            self._copier.let_go()
        return batch

    def metrics(self, values: dict[str, Any]) -> None:
        rates = {name: cache.statistics.hit_rate for name, cache in self._all().items()}
        values.update({f"gh200/cache/{name}/hit_rate": rate for name, rate in rates.items() if rate is not None})

    def telemetry(self) -> dict[str, Any]:
        return {name: _told(cache.report()) for name, cache in self._all().items()}

    def _all(self) -> Mapping[str, HeldCache]:
        return self._caches.caches if self._caches is not None else {}

    def memory_to_come(self) -> int:
        return self._caches.memory_to_come if self._caches is not None else 0

    def close(self) -> None:
        """Packs are written whatever the rest of the closing comes to: they are what the next start lives on.

        After a failure or an interrupt a user waits, so nothing more is written; SimpleTuner's own files are there.
        """
        self.batch_path = None
        with ExitStack() as ending:
            ending.callback(self._save_and_close)
            if self._copier is not None:
                ending.callback(self._copier.close)
            ending.callback(self._patches.remove)

    def _save_and_close(self) -> None:
        if self._caches is not None:
            if self.runtime.outcome.status == "completed":
                self._caches.save()
            else:
                self._caches.stop_saving()
            self._final = self.summary()
            self._caches.close()
            self._caches = None

    # -- making ----------------------------------------------------------------------------------------

    def _open(self, settings: CacheSettings, found: list[FoundCache], packs: Path | None, keep_free: int) -> Caches:
        group = NodeGroup.from_environment("caches")
        limit = settings.memory_limit_gb
        driver = current()
        self._slabs = maker = SlabMaker(driver, requested=settings.slab)
        return Caches(
            [cache.wanted for cache in found],
            allowed=gib_to_bytes(limit) if limit is not None else None,
            group=group,
            maker=maker,
            copies=maker.caps.mode != "none",
            packs=packs,
            keep_free=keep_free,
            promised=sum(feature.memory_to_come() for feature in self.runtime.features_on if feature is not self),
        )

    def _attach(self, found: list[FoundCache]) -> None:
        assert self._caches is not None
        backends = {id(cache.backend): cache.backend for cache in found}
        for identity, backend in backends.items():
            mine = [cache for cache in found if id(cache.backend) == identity]
            routes = [Route(cache.wanted.folder, self._caches.caches[cache.wanted.name]) for cache in mine]
            reads_itself = not hasattr(backend, "torch_load")
            served = ServedGrounding(backend, routes[0].cache) if reads_itself else ServedBackend(backend, routes)
            self._patches.install(*served.patches)
        self._held = {id(cache.cache): self._caches.caches[cache.wanted.name] for cache in found}

    def _batch_path(self, found: list[FoundCache]) -> BatchPath | None:
        collate = sys.modules.get(COLLATE)
        source = self.runtime.verdict.get("batch_path", ON)
        if not source.on:
            logger.warning("gh200: batches are joined by SimpleTuner itself: the batch path is %s", source)
        if collate is None or not source.on:
            return None
        latents = {dataset: self._held[id(cache.cache)] for cache in found for dataset in cache.latents_of}
        return BatchPath(collate, latents, self._delivery())

    def _delivery(self) -> Delivery:
        """Copies on a side stream where there is a device and prefetch is on; else batches in CPU memory."""
        import torch

        prefetch = self.settings.part(PrefetchSettings)
        if not prefetch.enable_prefetch:
            return partial(assemble, pool=BufferPool())
        if not torch.cuda.is_available():
            if self.settings.given(ENABLE_PREFETCH):
                logger.warning("gh200: no CUDA device: enable_prefetch has no effect here")
            return partial(assemble, pool=BufferPool())
        self._copier = Copier(CudaLane(torch.device("cuda", torch.cuda.current_device())))
        return DeviceDelivery(self._copier)


def _told(report: Mapping[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in TOLD} | {"held_bytes": report["bytes"]}


def _pack_folder(settings: CacheSettings, trainer: Any) -> Path | None:
    if not settings.persistent_cache:
        return None
    if settings.cache_dir is not None:
        return Path(settings.cache_dir)
    return Path(trainer.config.output_dir) / "gh200" / "cache"


def _keep_free(config: Any) -> int:
    """SimpleTuner's own threshold for a disk that is too full to go on, in bytes, which it has checked; 0 for none."""
    return parse_bytes(str(getattr(config, "disk_low_threshold", None))) or 0


def _from_environment(settings: Settings) -> bool:
    return settings.origins.get("gh200_optimizations.enable_uvm_hints", "").startswith("environment")


FEATURE = CachesFeature
