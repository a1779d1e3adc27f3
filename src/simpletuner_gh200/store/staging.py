"""Staging: a folder becomes sealed memory with an index, or an error and nothing at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.errors import DatasetCorrupt, FeatureUnavailable, StoreError
from simpletuner_gh200.memory.host import HostMemory, host_memory
from simpletuner_gh200.store.batch_stager import BatchStager, StagingPlan
from simpletuner_gh200.store.ceiling import WORKING_BYTES, Ceiling, ceiling
from simpletuner_gh200.store.choice import Choice, choose, estimate
from simpletuner_gh200.store.codecs import CodecName, codec
from simpletuner_gh200.store.discovery import BATCH_BYTES, Batch, Listing, walk
from simpletuner_gh200.store.image_check import Verify, image_formats
from simpletuner_gh200.store.index import Rows, write_index
from simpletuner_gh200.store.problems import printable
from simpletuner_gh200.store.report import StagingReport
from simpletuner_gh200.store.shared_memory import StagedMemory, new_state
from simpletuner_gh200.store.slab_writer import ALIGNMENT, SlabFull, SlabWriter
from simpletuner_gh200.telemetry.progress import Progress, progress
from simpletuner_gh200.units import MIB

MOST_THREADS = 72
"""With their buffers these stay within the working memory, whatever ``num_workers`` says."""

CHECK_HOST_EVERY = 256 * MIB
HOPELESS = 1.5
"""An estimate this far over the ceiling stops before anything is read; a closer one is tried."""


@dataclass(frozen=True)
class StagingRequest:
    """What ``in_memory`` of a dataset entry says, with its folder."""

    root: Path
    compression: str | None = None
    workers: int = 1
    memory_limit_gb: float | None = None
    max_corruption_rate: float = 0.01
    verify: Verify = "header"
    extensions: tuple[str, ...] | None = None
    give_back_page_cache: bool = True


def request_for(folder: Path, settings: InMemorySettings) -> StagingRequest:
    """The request that an ``in_memory`` block makes for ``folder``."""
    return StagingRequest(
        root=folder,
        compression=settings.compression,
        workers=settings.workers(),
        memory_limit_gb=settings.memory_limit_gb,
        max_corruption_rate=settings.max_corruption_rate,
        verify=settings.verify,
        extensions=settings.file_extensions,
    )


def stage(
    request: StagingRequest,
    *,
    host: Callable[[], HostMemory] = host_memory,
    tick: Callable[[], None] = lambda: None,
    label: str = "staging",
    only: Callable[[bytes], bool] | None = None,
) -> tuple[StagedMemory, StagingReport]:
    """Stage all of ``request.root``. ``tick`` is called several times a second; ``only`` picks paths where given."""
    began = time.monotonic()
    if not request.root.is_dir():
        raise StoreError(
            f"instance_data_dir {printable(str(request.root))!r} is not a folder",
            remedy="correct the path of the dataset",
        )
    listing = walk(request.root, request.extensions, only=only)
    choice = choose(request.compression, listing)
    limit = ceiling(request.memory_limit_gb, host())
    _check_before(listing, choice, limit)
    run = _Run(request, listing, choice, limit, host)
    try:
        with progress(label, items=listing.files, size=listing.size) as shown:
            run.work(shown, tick)
        report = run.report(time.monotonic() - began)
        _check_corruption(report, request.max_corruption_rate)
        memory = run.finish()
    except BaseException:
        run.slab.discard()
        raise
    return memory, report


class _Run:
    """One staging: its threads, and what stops them all."""

    def __init__(
        self, request: StagingRequest, listing: Listing, choice: Choice, limit: Ceiling, host: Callable[[], HostMemory]
    ) -> None:
        self._request, self._listing, self._limit, self._host = request, listing, limit, host
        self.slab = SlabWriter(limit.allowed)
        self.slab.keep_on_cpu_nodes(min(limit.allowed, listing.size + ALIGNMENT * (listing.files + 1)))
        self._rows = Rows.new(listing.files)
        self._plan = StagingPlan(
            rows=self._rows,
            slab=self.slab,
            choice=choice,
            verify=request.verify,
            problems=listing.problems,
            give_back=request.give_back_page_cache,
        )
        self._checked = 0
        self._done = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def work(self, shown: Progress, tick: Callable[[], None]) -> None:
        if self._request.verify != "none":
            image_formats()  # Pillow's plug-ins are registered once, before threads ask for them
        batches = self._in_good_order()
        count = max(1, min(self._request.workers, MOST_THREADS, len(self._listing.batches)))
        with ThreadPoolExecutor(count, thread_name_prefix="gh200-stage") as pool:
            threads = [pool.submit(self._thread, batches, shown) for _ in range(count)]
            try:
                self._wait(threads, tick)
            except BaseException:
                self._stop.set()
                raise

    def _wait(self, threads: list[Future[None]], tick: Callable[[], None]) -> None:
        """In the main thread, so that an interrupt ends the staging and ``tick`` needs no lock."""
        for thread in threads:
            while True:
                try:
                    thread.result(timeout=0.2)
                    break
                except TimeoutError:
                    tick()
                except SlabFull as full:
                    raise self._too_large(full) from None

    def _thread(self, batches: Iterator[Batch], shown: Progress) -> None:
        stager = BatchStager(self._plan)
        try:
            while not self._stop.is_set():
                with self._lock:
                    batch = next(batches, None)
                if batch is None:
                    break
                stager.stage(batch)
                self._count(sum(batch.sizes))
                shown.advance(len(batch.names), sum(batch.sizes))
        except BaseException:
            self._stop.set()
            raise
        finally:
            with self._lock:
                self._checked += stager.checked

    def _count(self, size: int) -> None:
        with self._lock:
            crossed = self._done // CHECK_HOST_EVERY != (self._done + size) // CHECK_HOST_EVERY
            self._done += size
        if crossed and self._host().available < WORKING_BYTES // 2:
            raise SlabFull(self.slab.used)

    def _in_good_order(self) -> Iterator[Batch]:
        """Large files first, so that none is left to a single thread at the end; otherwise as the folder lists them."""
        batches = self._listing.batches
        yield from (batch for batch in batches if batch.sizes[0] > BATCH_BYTES)
        yield from (batch for batch in batches if batch.sizes[0] <= BATCH_BYTES)

    def _too_large(self, full: SlabFull) -> StoreError:
        """What is held so far is in proportion to what was read for it; no file is held larger than it is."""
        limit, most = self._limit, self._listing.size + ALIGNMENT * self._listing.files
        now = ceiling(self._request.memory_limit_gb, self._host())
        if now.allowed < full.needed <= limit.allowed:  # it is the machine that has less than it had
            limit = replace(now, allowed=self.slab.used + now.allowed)
        expected = self.slab.used * self._listing.size // self._done if self._done else 0
        others: tuple[CodecName, ...] = ("lz4", "zstd")
        chosen = self._plan.choice.default.name
        would_fit = estimates(self._listing, tuple(name for name in others if name != chosen))
        return limit.too_large(max(full.needed, min(expected, most)), exact=False, would_fit=would_fit)

    def report(self, seconds: float) -> StagingReport:
        return StagingReport.of(self._listing, self._rows, self.slab.used, self._plan.choice, self._checked, seconds)

    def finish(self) -> StagedMemory:
        index = write_index(self._rows)
        return StagedMemory(
            data=self.slab.finish(),
            index=index,
            state=new_state(self._rows.count),
            count=self._rows.count,
            aliases=tuple(self._listing.aliases),
        )


def _check_before(listing: Listing, choice: Choice, limit: Ceiling) -> None:
    """Where the size is known, or hopeless, stop before anything is allocated."""
    if not choice.compresses:
        if listing.size > limit.allowed:
            raise limit.too_large(listing.size, exact=True, would_fit=estimates(listing, ("lz4", "zstd")))
        return
    if choice.default.name == "raw":  # auto: what stays raw is known, the rest is extra
        known = sum(
            totals.size for ending, totals in listing.extensions.items() if choice.for_extension(ending).name == "raw"
        )
        if known > limit.allowed:
            raise limit.too_large(known, exact=False, would_fit=estimates(listing, ("lz4", "zstd")))
        return
    expected = estimate(listing, choice.default)
    if expected > limit.allowed * HOPELESS:
        raise limit.too_large(expected, exact=False, would_fit=estimates(listing, ("zstd",)))


def estimates(listing: Listing, names: tuple[CodecName, ...]) -> dict[str, int]:
    """Bytes the listing would take with each of these codecs that is installed."""
    found: dict[str, int] = {}
    for name in names:
        try:
            found[name] = estimate(listing, codec(name))
        except FeatureUnavailable:
            continue
    return found


def _check_corruption(report: StagingReport, allowed: float) -> None:
    if report.corruption_rate > allowed:
        worst = "; ".join(str(problem) for problem in list(report.problems)[:3])
        raise DatasetCorrupt(
            f"{report.problems.broken} of {report.judged} files are broken ({report.corruption_rate:.1%}, allowed are "
            f"{allowed:.1%}): {worst}",
            report=report.as_json(),
            remedy="repair or remove them (gh200 stage DIR --json lists all), or raise max_corruption_rate",
        )
