"""In-memory datasets: entries of type ``in_memory`` are staged once per node and served to all of its ranks.

What SimpleTuner reads before training, captions, is staged before it goes on; the rest too where ``wait`` says so.
Otherwise local rank 0 stages it in the background while the run goes on, and whoever reads it meanwhile reads the disk.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
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
from simpletuner_gh200.errors import DatasetCorrupt, FeatureUnavailable, GH200Error, StoreError
from simpletuner_gh200.held.files import HeldFiles
from simpletuner_gh200.held.listing import Listing, is_caption
from simpletuner_gh200.held.shelf import Board
from simpletuner_gh200.held.staging import StagingStopped, expected_size, look_over, stage
from simpletuner_gh200.held.staging_report import StagingReport
from simpletuner_gh200.memory.background import AT_ONCE, BackgroundJob, Effort, Pace, waits_for_first_step
from simpletuner_gh200.memory.host import HostMemory, host_memory
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.store.backend import backend_class
from simpletuner_gh200.seams.features.store.node import NodeNotes, dealt_stems, gather_stems, stem
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
class _Coming:
    """In the leader: what is staged while the run goes on."""

    name: str
    listing: Listing
    expected: int


class StoreFeature(Feature):
    name = "store"

    def __init__(self) -> None:
        self._beginning = threading.Lock()
        self._notes: NodeNotes | None = None
        """With the group of this node's ranks, from ``start`` to the end."""
        self._job: BackgroundJob | None = None
        self._forget()

    def _forget(self) -> None:
        """A process may train more than once (the Web UI does): nothing of the run before may serve this one."""
        self._entries: dict[str, _Entry] = {}
        self._held: dict[str, HeldFiles] = {}
        self._reports: dict[str, list[StagingReport]] = {}
        self._to_be_dealt: set[str] = set()
        """Datasets whose shard is staged once SimpleTuner has dealt it to the ranks."""
        self._coming: list[_Coming] = []
        self._owner = os.getpid()
        self._failure: GH200Error | None = None
        self._first_step = 0
        self._at_start: dict[str, int] = {}
        """Reads from disk before training, by dataset."""
        self._final: dict[str, Any] = {}

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "requested" if settings.in_memory_datasets else "off"

    # -- what SimpleTuner does, in its order -----------------------------------------------------------

    def start(self, trainer: Any) -> None:
        self._let_go()
        self._forget()
        group = NodeGroup.from_environment("store")
        group.join()
        self._notes = NodeNotes(group)

    def dataset_entries(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._rewritten(entry) for entry in entries]

    def create_backend(self, builder: Any, config: Any) -> Any | None:
        entry = self._entries.get(config.id)
        if entry is None:
            return None
        name = str(config.id)
        if name not in self._held:
            if entry.sharded and node_count() > 1:
                seam = self.runtime.seams[DEALING]
                if not seam.ok:
                    raise FeatureUnavailable(
                        f'"per_node": "shard" cannot work with this SimpleTuner: {DEALING}: {seam.status}',
                        remedy='set "per_node" to "all"',
                    )
                self._to_be_dealt.add(name)
            self._held[name] = self._hold(name, entry)
        compress = builder._get_compression_setting(config)
        return backend_class()(builder.accelerator, name, self._held[name], compress_cache=compress)

    def samples_dealt(self, metadata: Any) -> None:
        """The first deal of a dataset decides what its shard is; what later deals add is read from disk."""
        name = str(metadata.id)
        if name not in self._to_be_dealt:
            return
        self._to_be_dealt.discard(name)
        assert self._notes is not None
        group, share = self._notes.group, f"share of {name}"
        wanted = gather_stems(group, share, dealt_stems(metadata))
        if not group.is_leader:
            group.receive(share)
            return
        with self._failing(share):
            self._stage(name, self._look_over(name, lambda path: stem(path) in wanted))
        group.share(share)

    def data_ready(self, trainer: Any) -> None:
        if not waits_for_first_step(len(os.sched_getaffinity(0))):
            self._begin()

    def before_train(self, trainer: Any) -> None:
        self._first_step = int(trainer.state.get("global_step", 0))
        self._at_start = {name: held.counts.elsewhere for name, held in self._held.items()}
        for name in sorted(self._to_be_dealt):
            logger.warning(
                "gh200: dataset %s: SimpleTuner has not dealt it to the ranks, so nothing of it is in memory; "
                'set its "per_node" to "all" to hold it whole on every node',
                name,
            )

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        step = int(trainer.state.get("global_step", 0))
        if step > self._first_step:
            self._begin()
        if self._notes is not None:
            reason = self._notes.failure(step, self._failure.message if self._failure is not None else None)
            if reason is not None:
                raise self._failure or StoreError(f"local rank 0 could not hold a dataset in memory: {reason}")
        return batch

    def summary(self) -> dict[str, Any]:
        coming = {one.name for one in self._coming}
        return self._final or {
            name: {**held.summary(), **self._in_training(name), "arrived": name not in coming, **self._report_of(name)}
            for name, held in self._held.items()
        }

    def _in_training(self, name: str) -> dict[str, int]:
        before = self._at_start.get(name)
        return {} if before is None else {"elsewhere_in_training": self._held[name].counts.elsewhere - before}

    def telemetry(self) -> dict[str, Any]:
        return {name: {**vars(held.counts), "held_bytes": held.held_bytes} for name, held in self._held.items()}

    def memory_to_come(self) -> int:
        return self._notes.to_come if self._notes is not None else 0

    def close(self) -> None:
        self._final = self.summary()
        self._let_go()

    def _let_go(self) -> None:
        """The memory goes back when the last view of it does."""
        with self._beginning:
            job, self._job, self._coming = self._job, None, []
        if job is not None:
            job.stop(silence=10)
        if self._notes is not None:
            self._notes.group.close()
        self._notes = None
        self._held, self._to_be_dealt = {}, set()

    # -- entries ---------------------------------------------------------------------------------------

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
        text_caches = self.runtime.settings and self.runtime.settings.part(CacheSettings).text_cache_type
        wins = dataset.kind == "text_embeds" and text_caches == "unified_memory"
        if wins:
            logger.info(
                "gh200: dataset %r: text_cache_type is unified_memory, which serves it instead of in_memory", dataset.id
            )
        return wins

    # -- holding ---------------------------------------------------------------------------------------

    def _hold(self, name: str, entry: _Entry) -> HeldFiles:
        """Collective. Held once where several entries, of different resolutions say, share a folder."""
        for other in self._held:
            if self._entries[other].holds_the_same(entry):
                logger.info("gh200: dataset %s reads the folder of dataset %s: held once", name, other)
                return self._held[other]
        assert self._notes is not None
        group, shared = self._notes.group, f"dataset {name}"
        if not group.is_leader:
            _, (fd,) = group.receive(shared)
            return HeldFiles(Board.attach(fd), group.local_rank, self._notes.forgotten)
        board = Board.create(group.local_world_size)
        held = self._held[name] = HeldFiles(board, 0, self._notes.forgotten, self._begin)
        with self._failing(shared):
            self._stage_first(name, entry)
        group.share(shared, board.fd)
        return held

    def _stage_first(self, name: str, entry: _Entry) -> None:
        """All that is to be in memory before SimpleTuner goes on."""
        if name in self._to_be_dealt:
            return
        if entry.is_cache and not entry.folder.is_dir():
            logger.info("gh200: dataset %s: %s is still to be made: nothing to hold in memory", name, entry.folder)
            return
        listing = self._look_over(name)
        if entry.settings.wait or entry.is_cache:
            self._stage(name, listing)
            return
        self._stage(name, listing.part(is_caption))
        rest = replace(listing.part(lambda path: not is_caption(path)), problems=listing.problems)
        with self._beginning:
            self._coming.append(_Coming(name, rest, expected_size(entry.settings, rest)))
            self._promise()

    def _look_over(self, name: str, wanted: Callable[[bytes], bool] | None = None) -> Listing:
        entry = self._entries[name]
        return look_over(entry.folder, entry.settings, host=self._host_left, wanted=wanted, tick=self._beat)

    def _stage(
        self, name: str, listing: Listing, *, pace: Pace = AT_ONCE, threads: int | None = None, own: int = 0
    ) -> None:
        """``threads``: at most so many. ``own``: bytes that were promised to it."""
        entry, host = self._entries[name], partial(self._host_left, own)
        workers = min(entry.settings.workers(), threads or entry.settings.workers())
        settings = entry.settings.model_copy(update={"num_workers": workers})
        tick = self._beat if pace is AT_ONCE else _nobody_waits
        try:
            segment, report = stage(
                entry.folder, settings, listing=listing, host=host, tick=tick, label=f"staging {name}", pace=pace
            )
        except DatasetCorrupt as corrupt:
            write_problems(corrupt.report, name, self._output_folder())
            raise
        self._reports.setdefault(name, []).append(report)
        logger.info("gh200: dataset %s in memory: %s", name, report.line())
        if len(report.problems):
            write_problems(report.as_json(), name, self._output_folder())
        self._held[name].publish(segment)

    def _beat(self) -> None:
        """Other ranks wait, unless what is staged comes in the background."""
        if self._notes is not None:
            self._notes.group.beat()

    def _host_left(self, own: int = 0) -> HostMemory:
        """What is there for a dataset: without what those on their way were promised, but for its ``own`` promise."""
        host = host_memory()
        return replace(host, available=max(host.available - self.memory_to_come() + own, 0))

    def _promise(self) -> None:
        if self._notes is not None:
            self._notes.promise(sum(one.expected for one in self._coming))

    # -- in the background -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Stage what is still to come: SimpleTuner reads images, or is done with preparing the data.

        Not before: what it does then takes long enough. Only in the process of the rank: workers that it forks read
        images too.
        """
        if os.getpid() != self._owner:
            return
        with self._beginning:
            idle = self._job is None or self._job.state not in ("waiting", "running")
            if self._coming and idle and self._failure is None:
                self._job = BackgroundJob(self._stage_coming, name="gh200-staging")
                self._job.start()

    def _stage_coming(self, pace: Pace, effort: Effort) -> None:
        while self._coming:
            one = self._coming[0]
            try:
                self._stage(one.name, one.listing, pace=pace, threads=effort.threads, own=one.expected)
            except StagingStopped:
                return
            except GH200Error as failure:
                self._failure = failure
                logger.error("gh200: dataset %s: %s; the run ends with the next step", one.name, failure.message)
                return
            with self._beginning:
                if self._coming:  # else the run has ended
                    self._coming.pop(0)
                self._promise()

    @contextmanager
    def _failing(self, shared: str) -> Iterator[None]:
        """Where staging fails, the others are told."""
        try:
            yield
        except GH200Error as failure:
            assert self._notes is not None
            self._notes.group.fail(shared, failure.message)
            raise

    # -- reporting -------------------------------------------------------------------------------------

    def _report_of(self, name: str) -> dict[str, Any]:
        """Of the captions and of the rest together, where they were staged one after the other."""
        *earlier, last = [report.as_json() for report in self._reports.get(name, [])] or [{}]
        last.pop("problems", None)
        for report in earlier:
            for key in ("files", "staged", "bytes", "held_bytes"):
                last[key] += report[key]
            last["codecs"] = dict(Counter(last["codecs"]) + Counter(report["codecs"]))
        return last

    def _output_folder(self) -> Path:
        return Path(getattr(getattr(self.runtime.trainer, "config", None), "output_dir", None) or os.getcwd())


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


def _nobody_waits() -> None: ...


FEATURE = StoreFeature
