"""Staging: a folder becomes sealed memory with an index, or an error and nothing at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.errors import DatasetCorrupt, DatasetTooLarge, StoreError
from simpletuner_gh200.memory.ceilings import Allowance, dataset_allowance, staging_must_stop
from simpletuner_gh200.memory.driver.detect import single_pool
from simpletuner_gh200.memory.host import HostMemory, host_memory
from simpletuner_gh200.memory.pace import AT_ONCE, Pace
from simpletuner_gh200.store.batch_stager import BatchStager, StagingPlan
from simpletuner_gh200.store.codecs import CodecChoice, CodecName, choose, estimate, estimates
from simpletuner_gh200.store.discovery import BATCH_BYTES, Batch, Listing, walk
from simpletuner_gh200.store.file_reader import SETTLE_SECONDS
from simpletuner_gh200.store.image_check import Verify, image_formats
from simpletuner_gh200.store.index import Rows, write_index
from simpletuner_gh200.store.report import StagingReport
from simpletuner_gh200.store.shared_memory import StagedMemory, new_state
from simpletuner_gh200.store.slab_writer import ALIGNMENT, SlabFull, SlabWriter
from simpletuner_gh200.telemetry.printable import printable
from simpletuner_gh200.telemetry.progress import Progress, progress
from simpletuner_gh200.units import MIB, format_bytes

MOST_THREADS = 72
"""With their buffers these stay within the working memory, whatever ``num_workers`` says."""

CHECK_HOST_EVERY = 256 * MIB
HOPELESS = 1.5
"""An estimate this far over the ceiling stops before anything is read; a closer one is tried."""

SHOWN_PROBLEMS = 20


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


class StagingStopped(StoreError):
    """It was told to end before all was in memory."""


def look_over(
    request: StagingRequest,
    *,
    host: Callable[[], HostMemory] = host_memory,
    only: Callable[[bytes], bool] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Listing:
    """Everything that would be staged; an error where it is known already that it would not fit."""
    if not request.root.is_dir():
        raise StoreError(
            f"instance_data_dir {printable(str(request.root))!r} is not a folder",
            remedy="correct the path of the dataset",
        )
    listing = walk(request.root, request.extensions, only=only, tick=tick)
    limit = dataset_allowance(request.memory_limit_gb, host(), single_pool=single_pool())
    _check_before(listing, choose(request.compression, listing), limit)
    return listing


def expected_size(request: StagingRequest, listing: Listing) -> int:
    """Bytes of memory that staging what was listed will come to, about; never more than its files have."""
    choice = choose(request.compression, listing)
    if choice.default.name == "raw":
        return listing.size
    return min(estimate(listing, choice.default), listing.size)


def stage(
    request: StagingRequest,
    *,
    host: Callable[[], HostMemory] = host_memory,
    tick: Callable[[], None] = lambda: None,
    label: str = "staging",
    only: Callable[[bytes], bool] | None = None,
    listing: Listing | None = None,
    pace: Pace = AT_ONCE,
) -> tuple[StagedMemory, StagingReport]:
    """Stage all of ``request.root``. ``tick`` is called several times a second; ``only`` picks paths where given.

    ``listing``: what is to be staged, where somebody has looked over it already. ``pace`` may slow it down, and end it
    early: StagingStopped then, and nothing is held.
    """
    began = time.monotonic()
    if listing is None:
        listing = look_over(request, host=host, only=only, tick=tick)
    choice = choose(request.compression, listing)
    limit = dataset_allowance(request.memory_limit_gb, host(), single_pool=single_pool())
    run = _Run(request, listing, choice, limit, host, pace)
    try:
        quiet = pace is not AT_ONCE
        with progress(label, items=listing.files, size=listing.size, quiet=quiet) as shown:
            run.work(shown, tick)
        report = run.report(time.monotonic() - began)
        _check_corruption(report, request.max_corruption_rate)
        memory = run.finish()
    except BaseException:
        run.slab.discard()
        raise
    return memory, report


def check_size(request: StagingRequest, allowed: Allowance) -> int:
    """The bytes below ``request.root``; DatasetTooLarge where staging would refuse them before it reads one."""
    listing = walk(request.root, request.extensions)
    _check_before(listing, choose(request.compression, listing), allowed)
    return listing.size


class _Run:
    """One staging: its threads, and what stops them all."""

    def __init__(
        self,
        request: StagingRequest,
        listing: Listing,
        choice: CodecChoice,
        limit: Allowance,
        host: Callable[[], HostMemory],
        pace: Pace,
    ) -> None:
        self._request, self._listing, self._limit, self._host = request, listing, limit, host
        self._pace = pace
        self.slab = SlabWriter(limit.size)
        self.slab.keep_on_cpu_nodes(min(limit.size, listing.size + ALIGNMENT * (listing.files + 1)))
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
                if self._pace.ended:
                    raise StagingStopped("staging was told to end")
                self._look_again(pool, tick)
            except BaseException:
                self._stop.set()
                raise

    def _look_again(self, pool: ThreadPoolExecutor, tick: Callable[[], None]) -> None:
        """At what was changed just before it was read, and may have been read half changed."""
        recent = self._plan.recent
        batches = [one for one in self._listing.batches if recent[one.first : one.first + len(one.names)].any()]
        if not batches:
            return
        time.sleep(SETTLE_SECONDS)
        todo = iter(batches)
        self._wait([pool.submit(self._again, todo) for _ in range(min(len(batches), MOST_THREADS))], tick)

    def _again(self, batches: Iterator[Batch]) -> None:
        stager = BatchStager(self._plan)
        while not self._stop.is_set():
            with self._lock:
                batch = next(batches, None)
            if batch is None:
                return
            stager.look_again(batch)

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
        self._pace.begin()
        stager = BatchStager(self._plan)
        try:
            while not self._stop.is_set() and not self._pace.ended:
                with self._lock:
                    batch = next(batches, None)
                if batch is None:
                    break
                stager.stage(batch)
                self._count(sum(batch.sizes))
                shown.advance(len(batch.names), sum(batch.sizes))
                self._pace.rest(sum(batch.sizes))
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
        if crossed and staging_must_stop(self._host()):
            raise SlabFull(self.slab.used)

    def _in_good_order(self) -> Iterator[Batch]:
        """Large files first, so that none is left to a single thread at the end; otherwise as the folder lists them."""
        batches = self._listing.batches
        yield from (batch for batch in batches if batch.sizes[0] > BATCH_BYTES)
        yield from (batch for batch in batches if batch.sizes[0] <= BATCH_BYTES)

    def _too_large(self, full: SlabFull) -> StoreError:
        """What is held so far is in proportion to what was read for it; no file is held larger than it is."""
        limit, most = self._limit, self._listing.size + ALIGNMENT * self._listing.files
        now = dataset_allowance(self._request.memory_limit_gb, self._host(), single_pool=single_pool())
        if now.size < full.needed <= limit.size:  # it is the machine that has less than it had
            limit = replace(now, size=self.slab.used + now.size)
        expected = self.slab.used * self._listing.size // self._done if self._done else 0
        others: tuple[CodecName, ...] = ("lz4", "zstd")
        chosen = self._plan.choice.default.name
        would_fit = estimates(self._listing, tuple(name for name in others if name != chosen))
        return too_large(limit, max(full.needed, min(expected, most)), exact=False, would_fit=would_fit)

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


def _check_before(listing: Listing, choice: CodecChoice, limit: Allowance) -> None:
    """Where the size is known, or hopeless, stop before anything is allocated."""
    if not choice.compresses:
        if listing.size > limit.size:
            raise too_large(limit, listing.size, exact=True, would_fit=estimates(listing, ("lz4", "zstd")))
        return
    if choice.default.name == "raw":  # auto: what stays raw is known, the rest is extra
        known = sum(
            totals.size for ending, totals in listing.extensions.items() if choice.for_extension(ending).name == "raw"
        )
        if known > limit.size:
            raise too_large(limit, known, exact=False, would_fit=estimates(listing, ("lz4", "zstd")))
        return
    expected = estimate(listing, choice.default)
    if expected > limit.size * HOPELESS:
        raise too_large(limit, expected, exact=False, would_fit=estimates(listing, ("zstd",)))


def _check_corruption(report: StagingReport, allowed: float) -> None:
    if report.corruption_rate > allowed:
        worst, damage = "; ".join(str(problem) for problem in list(report.problems)[:3]), report.damage
        raise DatasetCorrupt(
            f"{damage.broken} of {damage.files} files are broken ({damage.rate:.1%}, at most {allowed:.1%} allowed; "
            f"counted: {damage.kind}): {worst}",
            report=report.as_json(),
            remedy="repair or remove them (gh200 stage DIR --json lists all), or raise max_corruption_rate",
        )


def too_large(limit: Allowance, needed: int, *, exact: bool, would_fit: dict[str, int]) -> DatasetTooLarge:
    """The error for ``needed`` bytes; ``would_fit`` are estimates for other codecs."""
    fitting = [f"{name} (about {format_bytes(size)})" for name, size in would_fit.items() if size <= limit.size]
    if fitting:
        remedy = f'set "compression" to {" or ".join(fitting)}, which would fit'
    elif would_fit:
        least = min(would_fit.values())
        remedy = f"no compression makes it fit (at best about {format_bytes(least)}); raise the limit or stage less"
    else:
        remedy = "raise the limit, stage less with file_extensions, or leave this dataset at type local"
    amount = ("" if exact else "at least ") + format_bytes(needed)
    message = f"the dataset needs {amount} in memory, and {format_bytes(limit.size)} is allowed ({limit.why})"
    return DatasetTooLarge(message, needed=needed, allowed=limit.size, remedy=remedy)


def try_folder(folder: Path, settings: InMemorySettings) -> dict[str, Any]:
    """A folder staged as a run would stage it, and given back: its report, and what each codec would make of it.

    JSON-ready. Broken files never stop a trial, since it is there to find them; the ceiling does.
    """
    lenient = settings.model_copy(update={"max_corruption_rate": 1.0})
    memory, report = stage(request_for(folder, lenient), label=f"staging {printable(folder.name)}")
    memory.close()
    guesses = estimates(walk(folder, settings.file_extensions), ("lz4", "zlib", "snappy", "zstd"))
    return {
        **report.as_json(),
        "estimates": guesses,
        "first_problems": [str(problem) for problem in list(report.problems)[:SHOWN_PROBLEMS]],
    }
