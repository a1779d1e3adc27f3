"""In-memory datasets: entries of type ``in_memory`` are staged once per node and served to all of its ranks."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.blocks import CacheSettings, InMemorySettings
from simpletuner_gh200.config.datasets import Dataset
from simpletuner_gh200.config.environment import node_count
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import DatasetCorrupt, FeatureUnavailable, GH200Error
from simpletuner_gh200.memory.host import HostMemory, host_memory
from simpletuner_gh200.memory.pace import Effort, Pace, waits_for_first_step
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.store.arrival import Ahead, Arrivals, CountingPace
from simpletuner_gh200.seams.features.store.backend import backend_class
from simpletuner_gh200.seams.features.store.shard import dealt_stems, gather_stems, stem
from simpletuner_gh200.store.coming import ComingDataset, is_caption
from simpletuner_gh200.store.discovery import Listing, part_of
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.report import StagingReport
from simpletuner_gh200.store.scrub import Scrub
from simpletuner_gh200.store.shared_memory import StagedMemory, nothing_staged, receive_memory, share_memory
from simpletuner_gh200.store.staging import expected_size, look_over, request_for, stage
from simpletuner_gh200.telemetry.sink import write_whole

logger = logging.getLogger("simpletuner_gh200")

DEALING = "metadata.split_buckets"
"""The seam that tells when samples are dealt."""


@dataclass(frozen=True)
class _Entry:
    """What was asked for one dataset."""

    folder: Path
    settings: InMemorySettings
    is_cache: bool = False
    """SimpleTuner makes the folder itself, if it is not there yet."""
    sharded: bool = False

    def holds_the_same(self, other: _Entry) -> bool:
        mine, theirs = self.settings, other.settings
        return self.folder.absolute() == other.folder.absolute() and (
            (mine.compression, mine.file_extensions, self.sharded)
            == (theirs.compression, theirs.file_extensions, other.sharded)
        )


@dataclass(frozen=True)
class _InBackground:
    """How a dataset is staged while training runs."""

    listing: Listing | None
    pace: Pace
    effort: Effort


class StoreFeature(Feature):
    name = "store"

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._staged: dict[str, StagedDataset | ComingDataset] = {}
        self._arrivals: Arrivals | None = None
        self._captions: Ahead | None = None
        self._first_step: int | None = None
        self._reports: dict[str, StagingReport] = {}
        self._scrubs: list[Scrub] = []
        self._group: NodeGroup | None = None
        self._to_be_dealt: dict[str, Callable[[Any], None]] = {}
        """By dataset: who stages its shard, once SimpleTuner has dealt it to the ranks."""
        self._final: dict[str, Any] = {}

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "asked" if settings.in_memory_datasets else "off"

    def demo_config(self) -> dict[str, Any]:
        return {"dataset": {"type": "in_memory", "in_memory": {"compression": "auto"}}}

    def start(self, trainer: Any) -> None:
        """A process may train more than once (the Web UI does): nothing of the run before may serve this one."""
        self._let_go()
        self._entries, self._reports, self._final = {}, {}, {}
        self._group = NodeGroup.from_environment("store")
        self._group.join()
        # Of its own: what comes in the background must not meet what is shared meanwhile. Nor does anybody grow
        # impatient there: one rank may prepare data for an hour while the others wait, and training waits for none.
        arrivals = NodeGroup.from_environment("arrivals", patience=None)
        arrivals.join()
        self._arrivals = Arrivals(arrivals, self._watch_over)

    def dataset_entries(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._rewritten(entry) for entry in entries]

    def create_backend(self, builder: Any, config: Any) -> Any | None:
        entry = self._entries.get(config.id)
        if entry is None:
            return None
        name = str(config.id)
        later = entry.sharded and node_count() > 1
        if name not in self._staged:
            self._staged[name] = StagedDataset(nothing_staged()) if later else self._whole(name, entry)
        compress = builder._get_compression_setting(config)
        backend = backend_class()(builder.accelerator, name, self._staged[name], compress_cache=compress)
        if later:
            self._refuse_if_not_dealt()
            self._to_be_dealt[name] = lambda metadata: self._stage_shard(name, entry, backend, metadata)
        return backend

    def _refuse_if_not_dealt(self) -> None:
        seam = self.runtime.seams[DEALING]
        if not seam.ok:
            raise FeatureUnavailable(
                f'"per_node": "shard" cannot work with this SimpleTuner: {DEALING}: {seam.status}',
                remedy='set "per_node" to "all"',
            )

    def data_ready(self, trainer: Any) -> None:
        self._settle()
        if self._arrivals is not None and not waits_for_first_step(len(os.sched_getaffinity(0))):
            self._arrivals.begin()

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        if self._arrivals is not None:
            step = int(trainer.state.get("global_step", 0))
            self._first_step = step if self._first_step is None else self._first_step
            if step > self._first_step:
                self._arrivals.begin()
            self._arrivals.end_if_failed(step)
        return batch

    def _settle(self) -> None:
        """What the ranks share is shared in one order: captions that are on their way come first."""
        if self._captions is not None:
            self._captions.wait()
            self._captions = None

    def samples_dealt(self, metadata: Any) -> None:
        """The first deal of a dataset decides what its shard is; what later deals add is read from disk."""
        stage_shard = self._to_be_dealt.pop(str(metadata.id), None)
        if stage_shard is not None:
            stage_shard(metadata)

    def summary(self) -> dict[str, Any]:
        return self._final or {
            name: {**staged.summary(), **(_without_list(self._reports[name]) if name in self._reports else {})}
            for name, staged in self._staged.items()
        }

    def telemetry(self) -> dict[str, Any]:
        return {name: {**vars(staged.counts), "held_bytes": staged.held_bytes} for name, staged in self._staged.items()}

    def memory_to_come(self) -> int:
        return self._arrivals.promised.bytes if self._arrivals is not None else 0

    def _host_left(self, own: int = 0) -> HostMemory:
        """What is there for a dataset: without what those on their way were promised, but for its ``own`` promise."""
        host = host_memory()
        return replace(host, available=max(host.available - self.memory_to_come() + own, 0))

    def before_train(self, trainer: Any) -> None:
        for name in sorted(self._to_be_dealt):
            logger.warning(
                "gh200: dataset %s: SimpleTuner has not dealt it to the ranks, so nothing of it is in memory; "
                'set its "per_node" to "all" to hold it whole on every node',
                name,
            )

    def close(self) -> None:
        self._final = self.summary()
        self._let_go()

    def _let_go(self) -> None:
        """The memory goes back when the last view of it does."""
        self._to_be_dealt.clear()
        self._first_step = None
        if self._captions is not None:
            self._captions.stop()
            self._captions = None
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        for scrub in self._scrubs:
            scrub.stop()
        self._scrubs.clear()
        if self._group is not None:
            self._group.close()
            self._group = None
        self._staged = {}

    def _rewritten(self, entry: dict[str, Any]) -> dict[str, Any]:
        """As upstream is to see it: a local dataset. Ours are remembered by id."""
        dataset = Dataset(entry)
        if not dataset.in_memory:
            return entry
        if dataset.enabled and not self._cache_wins(dataset):
            settings, folder = dataset.settings(), dataset.held_folder
            if folder is not None:
                sharded = settings.per_node == "shard" and dataset.dealt
                self._entries[dataset.id] = _Entry(folder, settings, is_cache=dataset.folder is None, sharded=sharded)
        return dataset.as_local()

    def _cache_wins(self, dataset: Dataset) -> bool:
        settings = self.runtime.settings
        if dataset.kind != "text_embeds" or settings is None:
            return False
        wins = settings.part(CacheSettings).text_cache_type == "unified_memory"
        if wins:
            logger.info(
                "gh200: dataset %r: text_cache_type is unified_memory, which serves it instead of in_memory", dataset.id
            )
        return wins

    def _whole(self, name: str, entry: _Entry) -> StagedDataset | ComingDataset:
        """All of an entry's folder; held once where several entries, of different resolutions say, share it."""
        for other in self._staged:
            if self._entries[other].holds_the_same(entry):
                logger.info("gh200: dataset %s reads the folder of dataset %s: held once", name, other)
                return self._staged[other]
        if entry.settings.wait or entry.is_cache:
            return self._obtain(name, entry, None)
        return self._captions_first(name, entry)

    def _captions_first(self, name: str, entry: _Entry) -> ComingDataset:
        """What SimpleTuner reads before training starts is staged now, the rest while it trains."""
        assert self._group is not None
        assert self._arrivals is not None
        self._settle()
        group, arrivals, shared = self._group, self._arrivals.group, f"captions of {name}"
        promised = self._arrivals.promised
        listing, expected = None, 0
        asked = request_for(entry.folder, entry.settings)
        looked = f"listing of {name}"
        if group.is_leader:
            with self._failing(group, looked, name):
                listing = look_over(asked, host=self._host_left, tick=group.beat)
                expected = expected_size(asked, listing)
                promised.set(name, expected)
            group.share(looked)
        else:
            # Here, not where the captions are waited for: a barrier lies between, and there all that a rank learns of a
            # leader that has ended is that the connection was closed.
            group.receive(looked)

        def captions(pace: Pace) -> StagedDataset:
            """While SimpleTuner sorts its samples, which takes longer."""
            if listing is None:
                return _served(receive_memory(group, shared))
            with self._failing(group, shared, name):
                # Nothing to check or to compress, and the rest of the folder is read again anyway.
                request = replace(asked, compression=None, verify="none", give_back_page_cache=False)
                host = partial(self._host_left, expected)
                memory, _report = stage(
                    request, tick=group.beat, listing=part_of(listing, is_caption), pace=pace, host=host
                )
            share_memory(group, shared, memory)
            return _served(memory)

        self._captions = Ahead(captions)
        coming = ComingDataset(self._captions.coming, self._arrivals.begin)

        def obtain(pace: Pace, effort: Effort) -> StagedDataset:
            if listing is None:
                return self._receive_or_stage(arrivals, name, entry, None, _InBackground(None, pace, effort))
            size = max(listing.size, 1)
            counting = CountingPace(pace, lambda done: promised.set(name, expected - expected * done // size))
            try:
                return self._receive_or_stage(arrivals, name, entry, None, _InBackground(listing, counting, effort))
            finally:
                promised.set(name, 0)

        self._arrivals.expect(name, coming, obtain)
        return coming

    def _stage_shard(self, name: str, entry: _Entry, backend: Any, metadata: Any) -> None:
        """Every rank of the node has its share now: stage the union, and serve it from here on."""
        assert self._group is not None
        self._settle()
        wanted = gather_stems(self._group, f"share of {name}", dealt_stems(metadata))
        self._staged[name] = backend.staged = self._obtain(name, entry, lambda path: stem(path) in wanted)

    def _obtain(self, name: str, entry: _Entry, only: Callable[[bytes], bool] | None) -> StagedDataset:
        assert self._group is not None
        self._settle()
        dataset = self._receive_or_stage(self._group, name, entry, only)
        self._watch_over(dataset)
        return dataset

    def _receive_or_stage(
        self,
        group: NodeGroup,
        name: str,
        entry: _Entry,
        only: Callable[[bytes], bool] | None,
        background: _InBackground | None = None,
    ) -> StagedDataset:
        if group.is_leader:
            memory = self._stage(name, entry, group, only, background)
        else:
            memory = receive_memory(group, f"dataset {name}")
        return _served(memory)

    def _watch_over(self, dataset: StagedDataset) -> None:
        """A scrub, in one rank of the node."""
        if self._group is not None and self._group.is_leader and dataset.count:
            scrub = Scrub(dataset)
            scrub.start()
            self._scrubs.append(scrub)

    def _stage(
        self,
        name: str,
        entry: _Entry,
        group: NodeGroup,
        only: Callable[[bytes], bool] | None,
        background: _InBackground | None,
    ) -> StagedMemory:
        if entry.is_cache and not entry.folder.is_dir():
            # For all ranks: one that looked later might find the folder made.
            logger.info("gh200: dataset %s: %s is still to be made: nothing to hold in memory", name, entry.folder)
            nothing = nothing_staged()
            share_memory(group, f"dataset {name}", nothing)
            return nothing
        request = request_for(entry.folder, entry.settings)
        options: dict[str, Any] = {"host": self._host_left}
        if background is not None:
            options = {"listing": background.listing, "pace": background.pace}
            request = replace(request, workers=min(request.workers, background.effort.threads))
        with self._failing(group, f"dataset {name}", name):
            memory, report = stage(request, tick=group.beat, label=f"staging {name}", only=only, **options)
        self._reports[name] = report
        logger.info("gh200: dataset %s in memory: %s", name, report.line())
        if len(report.problems):
            write_problems(report.as_json(), name, self._output_folder())
        share_memory(group, f"dataset {name}", memory)
        return memory

    @contextmanager
    def _failing(self, group: NodeGroup, shared: str, name: str) -> Iterator[None]:
        """Where staging fails, the others are told; what is broken is listed."""
        try:
            yield
        except GH200Error as failure:
            group.fail(shared, failure.message)
            if isinstance(failure, DatasetCorrupt):
                write_problems(failure.report, name, self._output_folder())
            raise

    def _output_folder(self) -> Path:
        return Path(getattr(getattr(self.runtime.trainer, "config", None), "output_dir", None) or os.getcwd())


def _served(memory: StagedMemory) -> StagedDataset:
    dataset = StagedDataset(memory)
    memory.close()
    return dataset


def _without_list(report: StagingReport) -> dict[str, Any]:
    return {key: value for key, value in report.as_json().items() if key != "problems"}


def write_problems(report: Mapping[str, Any], dataset: str, output: Path) -> None:
    """The list of a dataset's broken files, ``<output>/gh200/staging-<dataset>.json``, whole or not at all.

    A list is no reason to end a run: where it can't be written that is said beside what it would have listed.
    """
    path = output / "gh200" / f"staging-{re.sub(r'[^A-Za-z0-9._-]', '_', dataset)}.json"
    listed = f"listed in {path}"
    try:
        write_whole(path, report)
    except OSError as refused:
        listed = f"the list could not be written: {refused}"
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(report["problem_counts"].items()))
    logger.warning("gh200: dataset %s: %s; %s", dataset, counts, listed)


FEATURE = StoreFeature
