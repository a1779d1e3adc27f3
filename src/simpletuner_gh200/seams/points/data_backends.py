"""Datasets: the list once it was read, a backend about to be made, samples found and dealt to the ranks."""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import psutil

from simpletuner_gh200.config.datasets import IN_MEMORY, with_in_memory_for_all
from simpletuner_gh200.seams.patch import Patch, put
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam, wrapping
from simpletuner_gh200.units import KIB


def _load_configuration(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    entries = with_in_memory_for_all(wrapped(*args, **kwargs), runtime.in_memory_for_all)
    for rewrite in runtime.moment("dataset_entries"):
        entries = rewrite(entries)
    return entries


def _local_builder(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    config = args[0] if args else kwargs["config"]
    for create in runtime.moment("create_backend"):
        backend = create(instance, config)
        if backend is not None:
            return backend
    return wrapped(*args, **kwargs)


def _split_buckets(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    runtime.call("samples_dealt", instance)
    return result


def _scan(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """Between threads, a queue of threads. Upstream's is one of processes, into which a thread of its own writes; and
    upstream stops reading when its workers have ended. On a busy machine that thread comes too late: samples are lost,
    or what is known of them, and the sampler ends the run over one of those.
    """
    if not hasattr(module, "Queue"):
        return []
    between_processes = module.Queue

    def queue() -> Any:
        return between_processes() if module.StateTracker.get_args().enable_multiprocessing else SimpleQueue()

    return [put(module, "Queue", queue)]


def _builder(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A page that scans or shows such a dataset reads its files where they are; only a run holds them in memory."""

    def call(backend_type: str, *rest: Any, **options: Any) -> Any:
        return wrapped("local" if backend_type == IN_MEMORY else backend_type, *rest, **options)

    return call(*args, **kwargs)


def _memory_usage(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """Nothing where the factory no longer traces: then there is nothing to spare a run."""
    if not hasattr(module, "tracemalloc"):
        return []
    wanted = ("store", "caches")
    return [put(module, "tracemalloc", Untraced(lambda: any(map(runtime.feature_on, wanted))))]


class Untraced:
    """What SimpleTuner's data factory gets in place of ``tracemalloc``: nothing is traced while ``spares()``.

    The factory starts tracing to log how much memory it uses, and never stops: every object that Python makes from then
    on, in every thread and in every step of training, is entered in a table under a lock. A plain loop takes ten times
    as long so. The numbers it logs are those of the process instead, unless somebody else has asked for tracing.
    """

    def __init__(self, spares: Callable[[], bool]) -> None:
        self._spares = spares

    def start(self, *frames: int) -> None:
        if not self._spares():
            tracemalloc.start(*frames)

    def get_traced_memory(self) -> tuple[int, int]:
        """(now, at most) in bytes: of what is traced, or of the process."""
        if tracemalloc.is_tracing() or not self._spares():
            return tracemalloc.get_traced_memory()
        return psutil.Process().memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB

    def __getattr__(self, name: str) -> Any:
        return getattr(tracemalloc, name)


SEAMS = (
    wrapping("backend.builder_map", _builder),
    wrapping("datasets.load_configuration", _load_configuration),
    wrapping("datasets.local_builder", _local_builder),
    Seam("datasets.memory_usage", _memory_usage),
    Seam("metadata.scan", _scan),
    wrapping("metadata.split_buckets", _split_buckets),
)
