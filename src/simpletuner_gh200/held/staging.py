"""Staging: a folder becomes a sealed segment, or an error and nothing at all."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.errors import DatasetCorrupt, DatasetTooLarge, StoreError
from simpletuner_gh200.held.codecs import CHUNKED, NAMES, CodecChoice, CodecName, choose, estimate, estimates
from simpletuner_gh200.held.files import FileSegment
from simpletuner_gh200.held.image_check import image_formats
from simpletuner_gh200.held.listing import BATCH_BYTES, FileBatch, Listing, list_files
from simpletuner_gh200.held.segment import ALIGNMENT, HEADER_SIZE, PLAIN, SegmentFull, SegmentWriter
from simpletuner_gh200.held.stager import SETTLED_NS, BatchStager, StagingPlan
from simpletuner_gh200.held.staging_report import Damage, StagingReport
from simpletuner_gh200.memory.background import AT_ONCE, Pace
from simpletuner_gh200.memory.ceilings import Allowance, dataset_allowance, staging_must_stop
from simpletuner_gh200.memory.driver.detect import single_pool
from simpletuner_gh200.memory.host import HostMemory, host_memory
from simpletuner_gh200.memory.mapping import create_memfd, map_file
from simpletuner_gh200.memory.numa import bind, read_nodes
from simpletuner_gh200.telemetry.progress import Progress, progress
from simpletuner_gh200.telemetry.redact import printable
from simpletuner_gh200.units import MIB, format_bytes

MOST_THREADS = 72
"""With their buffers these stay within the working memory, whatever ``num_workers`` says."""

CHECK_HOST_EVERY = 256 * MIB
HOPELESS = 1.5
"""An estimate this far over the ceiling stops before anything is read; a closer one is tried."""

SHOWN_PROBLEMS = 20

DEFAULTS = InMemorySettings()


class StagingStopped(StoreError):
    """It was told to end before all was in memory."""


def look_over(
    root: Path,
    settings: InMemorySettings = DEFAULTS,
    *,
    host: Callable[[], HostMemory] = host_memory,
    wanted: Callable[[bytes], bool] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Listing:
    """Everything that would be staged, of paths that are ``wanted``; an error where it is known not to fit already."""
    if not root.is_dir():
        raise StoreError(
            f"instance_data_dir {printable(str(root))!r} is not a folder", remedy="correct the path of the dataset"
        )
    listing = list_files(root, settings.file_extensions, tick=tick)
    if wanted is not None:
        listing = replace(listing.part(wanted), problems=listing.problems)
    check_size(listing, settings, dataset_allowance(settings.memory_limit_gb, host(), single_pool=single_pool()))
    return listing


def check_size(listing: Listing, settings: InMemorySettings, limit: Allowance) -> None:
    """DatasetTooLarge where the size is known, or hopeless: before anything is read or allocated."""
    choice = choose(settings.compression, listing)
    if choice.default.name == "raw":  # with auto, what stays raw is known, the rest is extra
        totals = listing.extensions.items()
        needed = sum(total.size for ending, total in totals if choice.for_extension(ending).name == "raw")
        most: float = limit.size
    else:
        needed, most = estimate(listing, choice.default), limit.size * HOPELESS
    if needed > most:
        raise too_large(listing, choice, limit, needed, exact=not choice.compresses)


def expected_size(settings: InMemorySettings, listing: Listing) -> int:
    """Bytes of memory that staging what was listed will come to, about; never more than its files have."""
    choice = choose(settings.compression, listing)
    return listing.size if choice.default.name == "raw" else min(estimate(listing, choice.default), listing.size)


def stage(
    root: Path,
    settings: InMemorySettings = DEFAULTS,
    *,
    host: Callable[[], HostMemory] = host_memory,
    tick: Callable[[], None] = lambda: None,
    label: str = "staging",
    listing: Listing | None = None,
    pace: Pace = AT_ONCE,
    give_back: bool = True,
) -> tuple[FileSegment, StagingReport]:
    """Stage all of ``root``. ``tick`` is called several times a second.

    ``listing``: what is to be staged, where somebody has looked over it already. ``pace`` may slow it down, and end it
    early: StagingStopped then, and nothing is held. ``give_back``: drop the page cache of what was staged, which would
    hold the dataset a second time.
    """
    began = time.monotonic()
    if listing is None:
        listing = look_over(root, settings, host=host, tick=tick)
    run = _Run(settings, listing, host, pace, give_back)
    try:
        with progress(label, items=listing.files, size=listing.size, quiet=pace is not AT_ONCE) as shown:
            run.work(shown, tick)
        held = run.writer.used - HEADER_SIZE
        run.writer.finish(json.dumps([[os.fsdecode(part) for part in pair] for pair in listing.aliases]))
        segment = FileSegment.in_memory(os.dup(run.fd), name=f"data set {root}")
    finally:
        os.close(run.fd)
    assert isinstance(segment, FileSegment)
    numbers, counts = np.unique(segment.rows["form"] & ~np.uint16(CHUNKED), return_counts=True)
    report = StagingReport(
        files=listing.files,
        staged=len(segment),
        size=int(segment.rows["size"].sum()),
        held=held,
        images_checked=run.checked,
        seconds=time.monotonic() - began,
        forms={NAMES[int(number)]: int(count) for number, count in zip(numbers, counts, strict=True)},
        choices=run.choice.reasons,
        problems=listing.problems,
        damage=Damage.worst(listing.problems, {ending: totals.files for ending, totals in listing.extensions.items()}),
    )
    if report.corruption_rate > settings.max_corruption_rate:
        del segment  # an error may be kept for long, and what it refers to with it
        raise _corrupt(report, settings.max_corruption_rate)
    return segment, report


class _Run:
    """One staging: its threads, and what stops them all."""

    def __init__(
        self, settings: InMemorySettings, listing: Listing, host: Callable[[], HostMemory], pace: Pace, give_back: bool
    ) -> None:
        self._settings, self._listing, self._host, self._pace = settings, listing, host, pace
        self.choice = choose(settings.compression, listing)
        self._limit = self._allowance()
        self.fd = create_memfd("dataset")
        # As they are, all of them would take so much.
        most = listing.size + (ALIGNMENT + PLAIN.itemsize) * (listing.files + 1)
        _keep_on_cpu_nodes(self.fd, HEADER_SIZE + min(self._limit.size, most))
        self.writer = SegmentWriter(self.fd, rows=PLAIN, limit=self._limit.size + HEADER_SIZE)
        self._plan = StagingPlan(self.writer, self.choice, settings.verify, listing.problems, give_back)
        self.checked = 0
        self._done = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def _allowance(self) -> Allowance:
        return dataset_allowance(self._settings.memory_limit_gb, self._host(), single_pool=single_pool())

    def work(self, shown: Progress, tick: Callable[[], None]) -> None:
        if self._settings.verify != "none":
            image_formats()  # Pillow's plug-ins are registered once, before threads ask for them
        # Large files first, so that none is left to a single thread at the end; otherwise as the folder lists them.
        self._pass(sorted(self._listing.batches, key=lambda batch: batch.sizes[0] <= BATCH_BYTES), shown, tick)
        recent, self._plan.recent = self._plan.recent, None
        if recent:
            time.sleep(SETTLED_NS / 1e9)
            self._pass(recent, shown, tick)

    def _pass(self, batches: list[FileBatch], shown: Progress, tick: Callable[[], None]) -> None:
        count, waiting = max(1, min(self._settings.workers(), MOST_THREADS, len(batches))), iter(batches)
        with ThreadPoolExecutor(count, thread_name_prefix="gh200-stage") as pool:
            try:
                self._wait([pool.submit(self._thread, waiting, shown) for _ in range(count)], tick)
                if self._pace.ended:
                    raise StagingStopped("staging was ended")
            except BaseException:
                self._stop.set()
                raise

    def _thread(self, batches: Iterator[FileBatch], shown: Progress) -> None:
        self._pace.begin()
        stager = BatchStager(self._plan)
        try:
            while not self._stop.is_set() and not self._pace.ended:
                with self._lock:
                    batch = next(batches, None)
                if batch is None:
                    break
                size = sum(batch.sizes)
                if stager.stage(batch):
                    self._count(size)
                    shown.advance(len(batch.names), size)
                self._pace.rest(size)
        except BaseException:
            self._stop.set()
            raise
        finally:
            with self._lock:
                self.checked += stager.checked

    def _wait(self, threads: list[Future[None]], tick: Callable[[], None]) -> None:
        """In the main thread, so that an interrupt ends the staging and ``tick`` needs no lock."""
        for thread in threads:
            while True:
                try:
                    thread.result(timeout=0.2)
                    break
                except TimeoutError:
                    tick()
                except SegmentFull as full:
                    raise self._too_large(full.needed - HEADER_SIZE) from None

    def _count(self, size: int) -> None:
        with self._lock:
            crossed = self._done // CHECK_HOST_EVERY != (self._done + size) // CHECK_HOST_EVERY
            self._done += size
        if crossed and staging_must_stop(self._host()):
            raise SegmentFull(self.writer.used)

    def _too_large(self, needed: int) -> StoreError:
        """What is held so far is in proportion to what was read for it; no file is held larger than it is."""
        limit, used, now = self._limit, self.writer.used - HEADER_SIZE, self._allowance()
        if now.size < needed <= limit.size:  # it is the machine that has less than it had
            limit = replace(now, size=used + now.size)
        expected = used * self._listing.size // self._done if self._done else 0
        most = self._listing.size + ALIGNMENT * self._listing.files
        return too_large(self._listing, self.choice, limit, max(needed, min(expected, most)), exact=False)


def _keep_on_cpu_nodes(fd: int, at_most: int) -> None:
    """Have the kernel take pages from nodes with CPUs only, never from a GPU's memory.

    The policy belongs to the memory, not to this mapping of it, so it holds for whoever writes later.
    """
    if len(read_nodes()) >= 2:
        os.ftruncate(fd, at_most)
        mapped = map_file(fd, at_most)
        bind(mapped.address, mapped.size)


def _corrupt(report: StagingReport, allowed: float) -> DatasetCorrupt:
    worst, damage = "; ".join(str(problem) for problem in list(report.problems)[:3]), report.damage
    return DatasetCorrupt(
        f"{damage.broken} of {damage.files} files are broken ({damage.rate:.1%}, at most {allowed:.1%} allowed; "
        f"counted: {damage.kind}): {worst}",
        report=report.as_json(),
        remedy="repair or remove them (gh200 stage DIR --json lists all), or raise max_corruption_rate",
    )


def too_large(listing: Listing, choice: CodecChoice, limit: Allowance, needed: int, *, exact: bool) -> DatasetTooLarge:
    """The error for ``needed`` bytes; it says which other codecs would help."""
    others: tuple[CodecName, ...] = ("lz4", "zstd")
    would_fit = estimates(listing, tuple(name for name in others if name != choice.default.name))
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
    _segment, report = stage(folder, lenient, label=f"staging {printable(folder.name)}")
    guesses = estimates(list_files(folder, settings.file_extensions), ("lz4", "zlib", "snappy", "zstd"))
    return {
        **report.as_json(),
        "estimates": guesses,
        "first_problems": [str(problem) for problem in list(report.problems)[:SHOWN_PROBLEMS]],
    }
