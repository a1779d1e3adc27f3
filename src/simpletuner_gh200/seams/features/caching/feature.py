"""The caching pass: pictures are prepared by processes on all cores, SimpleTuner's VAE takes them in its own order."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from simpletuner_gh200.caching.pipeline import dealt
from simpletuner_gh200.caching.workers import WorkerLost, WorkerPool
from simpletuner_gh200.config.blocks import MOST_WORKERS, CacheSettings
from simpletuner_gh200.config.datasets import Dataset
from simpletuner_gh200.config.environment import DEBUG_PICTURES, local_size, node_count, text
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.memory.ceilings import pictures_allowance
from simpletuner_gh200.memory.host import host_memory, usable_cores
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.caching.session import Pass
from simpletuner_gh200.units import format_seconds

logger = logging.getLogger("simpletuner_gh200")

VAE = "simpletuner.helpers.caching.vae"
TARGET = "simpletuner_gh200.seams.features.caching.preparing:workshop"

FEW = 64
"""Pictures for which workers are not worth their start, unless they were asked for."""

NODES = "a node may not see what another one has cached; cache_config.caching: parallel does it where all see all"

DEBUG_LEVELS = (4, "debug")
"""Of SimpleTuner's webhooks: at it each picture is sent while it is prepared."""


class CachingFeature(Feature):
    name = "caching"

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._pictures = 0
        self._seconds = 0.0
        self._workers = 0
        self._said: set[str] = set()
        self._loading = True

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        if not settings.caching_in_parallel:
            return "off"
        return "auto" if settings.part(CacheSettings).caching is None else "requested"

    @property
    def _unasked(self) -> bool:
        return self.settings.part(CacheSettings).caching is None

    # -- moments ---------------------------------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        self._let_go()
        self._pictures, self._seconds, self._said, self._loading = 0, 0.0, set(), True
        self._workers = max(1, min(MOST_WORKERS, usable_cores() // local_size()))
        self._pool = WorkerPool(TARGET, self._workers)

    def dataset_entries(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Where there is much to do, what workers need is imported while SimpleTuner loads its models."""
        left_to_simpletuner = self._unasked and node_count() > 1
        if self._pool is not None and not left_to_simpletuner and any(map(_nothing_cached, entries)):
            try:
                self._pool.start()
            except (OSError, WorkerLost) as refused:
                logger.info("gh200: the workers of the caching pass could not be started early: %s", refused)
        return entries

    def caching_pass(self, cache: Any) -> Callable[[Callable[[], Any]], Any] | None:
        """Every rank is asked at the same time, as SimpleTuner's pass ends for all of them together."""
        if self._pool is None:
            return None
        share, reason = _agreed(cache)
        reason = reason or (NODES if self._unasked and node_count() > 1 else None)
        pictures = len(cache.local_unprocessed_files)
        if reason is not None:
            if pictures and reason not in self._said:
                logger.info("gh200: dataset %s is cached by SimpleTuner alone: %s", cache.id, reason)
            self._said.add(reason)
            return None
        if not pictures or (pictures < FEW and self._unasked):
            return None
        return lambda process_buckets: self._run(cache, share, process_buckets)

    def data_ready(self, trainer: Any) -> None:
        """There may be passes still, where caches are made anew each epoch; they start what they need."""
        self._let_go()
        self._loading = False

    def summary(self) -> dict[str, Any]:
        return {"pictures": self._pictures, "workers": self._workers, "seconds": round(self._seconds, 3)}

    def telemetry(self) -> dict[str, Any]:
        if not self._pictures:
            return {}
        return {"pictures": self._pictures, "pictures_per_second": self._pictures / max(self._seconds, 1e-6)}

    def close(self) -> None:
        self._let_go()

    # -- a pass ----------------------------------------------------------------------------------------

    def _run(self, cache: Any, share: list[str], process_buckets: Callable[[], Any]) -> Any:
        assert self._pool is not None
        began = time.monotonic()
        limit = self.settings.part(CacheSettings).caching_memory_gb
        ceiling = pictures_allowance(limit, host_memory(), local_size())
        missing, cache.local_unprocessed_files = cache.local_unprocessed_files, share
        try:
            now = Pass(cache, sys.modules[VAE], self._pool, ceiling, tell=partial(self.runtime.call, "caching_told"))
        except Exception as failure:
            # Nothing was touched yet; what workers can't be told of a data set is no reason to end a run.
            logger.warning("gh200: dataset %s is cached by SimpleTuner alone: %s", cache.id, failure, exc_info=failure)
            now = None
        try:
            return process_buckets() if now is None else now.run(process_buckets)
        finally:
            cache.local_unprocessed_files = missing
            if not self._loading:
                self._let_go()
            self._seconds += time.monotonic() - began
            if now is not None:
                self._pictures += now.pictures
                logger.info(
                    "gh200: dataset %s cached in %s with %d workers: %s",
                    *(cache.id, format_seconds(now.seconds), self._workers, now.line()),
                )

    def _let_go(self) -> None:
        if self._pool is not None:
            self._pool.close()


def why_not(cache: Any) -> str | None:
    """What this data set does that is not followed; None where it can be."""
    from simpletuner.helpers.caching.vae import VAECache
    from simpletuner.helpers.data_backend.local import LocalDataBackend
    from simpletuner.helpers.training.state_tracker import StateTracker

    backend = cache.image_data_backend
    webhook = StateTracker.get_webhook_handler()
    reasons = {
        "sound is not decoded by workers": "audio" in str(cache.dataset_type).lower(),
        "its samples are looked at for NSFW content": getattr(cache, "nsfw_check_enabled", False),
        "samples are encoded when they are needed": cache.vae_cache_ondemand,
        "its files are not local": not isinstance(backend, LocalDataBackend),
        "its VAE cache is not SimpleTuner's own": type(cache) is not VAECache,
        "each picture is sent to a webhook": getattr(webhook, "log_level", None) in DEBUG_LEVELS,
        "pictures are saved for debugging": text(DEBUG_PICTURES).lower() == "true",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _agreed(cache: Any) -> tuple[list[str], str | None]:
    """The files that this rank is to encode; why SimpleTuner has to do it alone, in all ranks or in none.

    In SimpleTuner 4 a rank also encodes what others have not written yet, in an order of chance. Then the speed of each
    decides whose random numbers a latent has, and much is done twice. With this every rank does what it alone would do.
    """
    missing, reason = cache.local_unprocessed_files, why_not(cache)
    if int(getattr(cache.accelerator, "num_processes", 1) or 1) == 1:
        return missing, reason
    from accelerate.utils import gather_object

    wanted, buckets = set(missing), cache.metadata_backend.aspect_ratio_bucket_indices
    own = [str(path) for files in buckets.values() for path in files if path in wanted]
    reasons, shares = zip(*gather_object([(reason, own)]), strict=True)
    return dealt(shares, cache.accelerator.process_index, missing), next(filter(None, reasons), None)


def _nothing_cached(entry: dict[str, Any]) -> bool:
    """Is there a folder of many files, and nothing yet where their latents go?"""
    dataset = Dataset(entry)
    pictures, latents = dataset.local_folder, dataset.path("cache_dir_vae")
    if pictures is None or latents is None or "{" in str(latents) or not dataset.enabled:
        return False
    return next(_files(latents), None) is None and len(list(islice(_files(pictures), FEW))) == FEW


def _files(folder: Path) -> Iterator[str]:
    """One after the other: a folder of a million is not read to its end to know whether there is one."""
    folders = [os.fspath(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry.name


FEATURE = CachingFeature
