"""All caches of one process: made together with the other ranks of the node, filled, reported and closed together."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.fill import Filler
from simpletuner_gh200.held.listing import CacheListing, cache_files
from simpletuner_gh200.held.pack_place import folder_for
from simpletuner_gh200.held.packs import PackFolder
from simpletuner_gh200.held.segment import Segment, key_of, keys_of
from simpletuner_gh200.held.shelf import Board, Shelf
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.background import AT_ONCE, BackgroundJob, BackgroundPace, Effort, Pace
from simpletuner_gh200.memory.ceilings import caches_allowance, divide
from simpletuner_gh200.memory.driver.detect import single_pool
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.telemetry.progress import progress
from simpletuner_gh200.units import counted, format_bytes, format_seconds

logger = logging.getLogger("simpletuner_gh200")

MOST_WORKERS = 72

NO_DOUBT = 2
"""So many times over must caches fit for their size to be taken from a sample of their files."""

WISHES_WAIT = 0.1
"""Seconds before files that were asked for are taken in, for each segment that is there: so there are few of them."""

EVERYTHING = (1 << 64) - 1

FillTime = Literal["start", "background", "lazy"]


@dataclass(frozen=True)
class Wanted:
    """A cache to serve: its files are the ``.pt`` files under ``folder``."""

    name: str
    kind: str
    folder: str
    expected: int = 0
    """Entries it may come to have, where more than are on disk now."""
    look_for_nan: bool = False
    made_by: str = ""
    """What of the configuration decides what entries hold: packs that another one made are not taken."""


@dataclass(frozen=True)
class Selection:
    """What is held where not all fits: entries whose key's high half is at most ``threshold``.

    An epoch is a permutation, so a cache that forgets the least recently used entry forgets just what comes next. A
    fixed subset hits at exactly its share, and since that is a property of the key, all ranks and restarts agree on it.
    """

    threshold: int
    kept_entries: int
    kept_bytes: int
    total_entries: int
    total_bytes: int
    allowed: int

    @property
    def complete(self) -> bool:
        return self.kept_entries == self.total_entries

    @property
    def expected_hit_rate(self) -> float:
        return self.kept_entries / self.total_entries if self.total_entries else 1.0

    def text(self, name: str) -> str:
        """One log line for people."""
        held = (
            f"{self.kept_entries} of {counted(self.total_entries, 'entry', 'entries')}, {format_bytes(self.kept_bytes)}"
        )
        if self.complete:
            return f"{name}: all {held}"
        return (
            f"{name}: {held} fit the budget of {format_bytes(self.allowed)}; expected hit rate "
            f"{self.expected_hit_rate:.1%}, the rest comes from disk. {format_bytes(self.total_bytes)} would hold all "
            f"(cache_config.memory_limit_gb)"
        )


def select(entries: Iterable[tuple[int, int]], allowed: int) -> Selection:
    """Choose among (key's high half, bytes)."""
    ordered = sorted(entries)
    ends = np.cumsum([size for _, size in ordered]) if ordered else np.zeros(1, np.int64)
    kept = int(np.searchsorted(ends, allowed, side="right")) if ordered else 0
    total, used = int(ends[-1]), int(ends[kept - 1]) if kept else 0
    if kept == len(ordered):
        return Selection(EVERYTHING, kept, total, kept, total, allowed)
    return Selection(ordered[kept - 1][0] if kept else 0, kept, used, len(ordered), total, allowed)


class Caches:
    """Collective: every rank of the node makes it with the same list, in the same order."""

    def __init__(
        self,
        wanted: Iterable[Wanted],
        *,
        allowed: int | None,
        group: NodeGroup,
        maker: SlabMaker | None = None,
        copies: bool = False,
        packs: Path | None = None,
        keep_free: int = 0,
        workers: int = 0,
        promised: int = 0,
    ) -> None:
        """``maker``: prepares memory for a device. ``copies``: a device copies from memory, so what packs hold goes
        there, behind the run; else it stays in packs.

        ``keep_free``: bytes of the disk that packs leave to others, where that is more than their own rule.
        ``promised``: bytes of the host that others will still take; they count where no limit is set.
        """
        self.wanted = {want.name: want for want in wanted}
        self.group = group
        self.workers = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self._root, self._keep_free, self._copies = packs, keep_free, copies
        self.packs: dict[str, PackFolder] = {}
        self._stop_saving = threading.Event()
        self._background: BackgroundJob | None = None
        self._wishes = _Wishes(self._grant)
        group.join()  # before the first long work, so that whoever waits hears that this rank lives
        self.files = {name: cache_files(want.folder, group.beat) for name, want in self.wanted.items()}
        host = host_memory()
        left = replace(host, available=max(host.available - promised, 0))
        self.allowed = caches_allowance(allowed, left, single_pool=single_pool())
        needs = self._needs()
        self._complete = self._bytes_when_complete(needs)
        shares = divide(needs, self.allowed)
        self.shares = {name: self.allowed if share is None else share for name, share in shares.items()}
        boards = self._boards()
        self.caches = {name: self._cache(want, boards[name]) for name, want in self.wanted.items()}
        self.fillers = {
            name: Filler(cache, allowed=self.shares[name] // group.local_world_size, maker=maker)
            for name, cache in self.caches.items()
        }
        self._open_packs()
        self.selections = {name: self._select(name) for name in self.caches}

    def _needs(self) -> dict[str, tuple[int, int]]:
        """(entries, bytes) of each cache: about, where that leaves no doubt that all of them fit."""
        about = {name: files.size for name, files in self.files.items()}
        if self.group.local_world_size > 1 or sum(about.values()) * NO_DOUBT > self.allowed:
            for files in self.files.values():
                files.measure(self.group.beat)
            about = {name: files.size for name, files in self.files.items()}
        return {name: (files.count, about[name]) for name, files in self.files.items()}

    def _bytes_when_complete(self, needs: Mapping[str, tuple[int, int]]) -> int | None:
        """Of all caches, with entries yet to be made as large as those on disk; None where there are none to tell."""
        total = 0
        for name, (entries, size) in needs.items():
            expected = max(entries, self.wanted[name].expected)
            if expected and not entries:
                return None
            total += size * expected // max(entries, 1)
        return total

    @property
    def memory_to_come(self) -> int:
        """Host bytes that the caches of this node may still take."""
        whole = self.allowed if self._complete is None else min(self.allowed, self._complete)
        return max(whole - sum(cache.held_bytes for cache in self.caches.values()), 0)

    def _boards(self) -> dict[str, Board]:
        """One for each cache: made by the leader, mapped by every rank."""
        if not self.group.is_leader:
            _, fds = self.group.receive("caches")
            boards = dict(zip(self.wanted, map(Board.attach, fds), strict=True))
            for fd in fds:
                os.close(fd)
            return boards
        boards = {name: Board.create(self.group.local_world_size) for name in self.wanted}
        if self.group.local_world_size > 1:
            self.group.share("caches", *(board.fd for board in boards.values()))
        return boards

    def _cache(self, want: Wanted, board: Board) -> HeldCache:
        def attach(fd: int) -> Segment:
            return self.fillers[want.name].attach(fd)  # made after its cache

        cache = HeldCache(
            want.name, Shelf(board, rank=self.group.local_rank, attach=attach), look_for_nan=want.look_for_nan
        )
        cache.wish = lambda path: self._wishes.add(want.name, path)
        return cache

    def _open_packs(self) -> None:
        """Every rank serves what is in packs from the first moment; the leader makes their folders, and writes them."""
        for name, want in self.wanted.items() if self._root is not None else ():
            assert self._root is not None
            packs = PackFolder(folder_for(self._root, name, want.folder), want.made_by, keep_free=self._keep_free)
            try:
                if self.group.is_leader:
                    packs.make(want.folder)
                segments = packs.open_all()
            except FileNotFoundError:  # in another rank the folder may not be made yet, and then there is nothing in it
                continue
            except (CacheError, OSError) as refused:
                logger.warning("gh200: cache %s goes without packs: %s", name, refused)
                continue
            self.packs[name] = packs
            for segment in segments:
                self.caches[name].shelf.add(segment)
            if segments:
                logger.info("gh200: cache %s: %d entries at hand in packs", name, len(self.caches[name].shelf))

    def _select(self, name: str) -> Selection:
        """Of what takes memory: all of it where a device copies from there, else what no pack has."""
        files, allowed, shelf = self.files[name], self.shares[name], self.caches[name].shelf
        size = files.size
        if size <= (allowed if files.measured else allowed // NO_DOUBT):
            chosen = Selection(EVERYTHING, files.count, size, files.count, size, allowed)
        else:
            keyed = [(key_of(path), size) for path, size in files]
            lacking = [(key, size) for key, size in keyed if self._copies or key not in shelf]
            chosen = select([(int.from_bytes(key[8:], "little"), size) for key, size in lacking], allowed)
            packed, packed_bytes = len(keyed) - len(lacking), size - chosen.total_bytes
            chosen = replace(
                chosen,
                kept_entries=chosen.kept_entries + packed,
                total_entries=len(keyed),
                kept_bytes=chosen.kept_bytes + packed_bytes,
                total_bytes=size,
            )
        self.caches[name].statistics.expected_hit_rate = chosen.expected_hit_rate
        if self.group.is_leader:
            level = logging.INFO if chosen.complete else logging.WARNING
            logger.log(level, "gh200: cache %s", chosen.text(name))
        return chosen

    # -- filling ---------------------------------------------------------------------------------------

    def fill(self, when: FillTime = "start", *, later: bool = False) -> None:
        """Take in what is on disk and in no pack; each rank does its part.

        ``start``: returns when all is in packs or memory. ``background``: returns at once; entries are served as they
        come, and what is asked for before that is taken from a pack, or from SimpleTuner's file. ``lazy``: only what is
        asked for; its packs are written at the end. ``later``: what is done in the background waits for ``go_on``.
        """
        if when == "start":
            self._fill(self.workers, AT_ONCE)
            self.group.meet("caches filled")
        if when != "lazy":
            work = self._settle if when == "start" else self._fill_in_background
            self._background = BackgroundJob(work, name="gh200-fill")
            if not later:
                self._background.start()

    def go_on(self) -> None:
        """Begin what ``fill`` left for later; nothing where it was begun."""
        if self._background is not None and self._background.state == "waiting":
            self._background.start()

    def wait_until_filled(self, timeout: float | None = None) -> bool:
        """For tests and tools: until what was begun in the background is done; False where it is not by then."""
        return (self._background is None or self._background.wait(timeout)) and self._wishes.wait(timeout)

    def _fill_in_background(self, pace: BackgroundPace, effort: Effort) -> None:
        self._fill(effort.threads, pace)
        self._settle(pace, effort)

    def _settle(self, pace: BackgroundPace, _effort: Effort) -> None:
        """Into memory what a device copies from there, each rank its part; into packs what they lack."""
        for name, cache in self.caches.items() if self._copies else ():
            for _key, segment, row in cache.shelf.current():
                if pace.ended or self.fillers[name].full:
                    break
                if segment.is_pack and self._is_mine(int(segment.rows["key_low"][row])):
                    self.fillers[name].copy_from_pack(segment.path(row))
                    pace.rest(0)
            self.fillers[name].seal()
        if self.group.is_leader and not pace.ended:
            self._save_all(pace)

    def _is_mine(self, low: int) -> bool:
        return low % self.group.local_world_size == self.group.local_rank

    def _fill(self, workers: int, pace: Pace) -> None:
        quiet = pace is not AT_ONCE
        for name, filler in self.fillers.items():
            self._look_at_packs(name, pace, quiet=quiet)
            self._measure(name)
            lacking, total = self._lacking(name, pace)
            with progress(f"filling cache {name}", items=len(lacking), size=total, quiet=quiet) as shown:
                filler.fill(lacking, workers=workers, progress=shown, pace=pace)

    def _look_at_packs(self, name: str, pace: Pace, *, quiet: bool) -> None:
        """Of this rank's part: what is in packs and is not the file any more leaves the shelf, and is taken in anew."""
        packs, cache = self.packs.get(name), self.caches[name]
        if packs is None:
            return
        started = time.perf_counter()

        def tick() -> bool:
            pace.rest(0)
            if not quiet:  # else nobody waits
                self.group.beat()
            return pace.ended

        share = (self.group.local_rank, self.group.local_world_size)
        for path, segment, row in packs.recognise(share=share, tick=tick):
            if cache.shelf.get(key_of(path)) == (segment, row):
                cache.forget(path)
        loaded = packs.account()
        loaded.seconds = time.perf_counter() - started
        cache.statistics.fill_seconds += loaded.seconds
        if loaded.entries or loaded.changed or loaded.of_others:
            logger.info(
                "gh200: cache %s: %d entries, %s, from packs in %s; %d had changed, "
                "%d were made by another configuration",
                name,
                loaded.entries,
                format_bytes(loaded.bytes),
                format_seconds(loaded.seconds),
                loaded.changed,
                loaded.of_others,
            )

    def _measure(self, name: str) -> None:
        """Where sizes were taken from a sample: know them, and choose again if the sample was mistaken."""
        files = self.files.get(name)
        if files is not None and not files.measured:
            files.measure()
            if files.size > self.shares[name]:
                self.selections[name] = self._select(name)

    def _lacking(self, name: str, pace: Pace) -> tuple[list[str], int]:
        """Of this rank's part of the files: those that are wanted and not held, and the bytes they have together."""
        files, shelf = self.files.pop(name, CacheListing()), self.caches[name].shelf
        parts, part = np.uint64(self.group.local_world_size), self.group.local_rank
        threshold = np.uint64(self.selections[name].threshold)
        lacking, total = [], 0
        for some in _neighbours(files):
            if pace.ended:
                break
            keys = keys_of([path for path, _ in some])
            for number in np.flatnonzero((keys[:, 0] % parts == part) & (keys[:, 1] <= threshold)).tolist():
                path, size = some[number]
                if keys[number].tobytes() not in shelf:
                    lacking.append(path)
                    total += size
            pace.rest(0)
        return lacking, total

    def _grant(self, wishes: Mapping[str, Sequence[str]], pace: Pace) -> None:
        """Take in files that were asked for, or made, while training runs: whole once they are asked for again."""
        for name, paths in wishes.items():
            threshold = self.selections[name].threshold
            admitted = [path for path in paths if int.from_bytes(key_of(path)[8:], "little") <= threshold]
            refused = len(paths) - len(admitted)
            if refused:
                self.caches[name].statistics.fall_back("not in the subset that fits", refused)
            self.fillers[name].fill(admitted, pace=pace)

    def drop(self, name: str) -> None:
        """SimpleTuner makes a cache anew: what is held of it is of no use any more, and there is room again."""
        self.caches[name].drop()
        self.fillers[name].drop()

    # -- ending ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write to the packs what they lack; the leader does it for the node. Filling in the background ends."""
        try:
            if self._stop_filling() and self.group.is_leader:
                self._grant(self._wishes.take(), AT_ONCE)
                for cache in self.caches.values():
                    cache.shelf.refresh()  # the others are about to end, and what they filled goes with them
                self._save_all()
        except KeyboardInterrupt:
            self.stop_saving()
            raise

    def stop_saving(self) -> None:
        """The run did not complete: nobody is to wait for packs. They end at the next entry."""
        self._stop_saving.set()
        self._stop_filling()

    def _stop_filling(self) -> bool:
        """False where it does not end: what it works on stays as it is then, and goes with the process."""
        stopped = self._wishes.stop()
        return (self._background is None or self._background.stop()) and stopped

    def _save_all(self, pace: Pace = AT_ONCE) -> None:
        def stop() -> bool:
            pace.rest(0)  # not at all once the run has ended, and whoever ends it waits for its packs
            return self._stop_saving.is_set()

        for name, packs in self.packs.items():
            try:
                written = packs.save(self.caches[name], stop=stop)
            except (CacheError, OSError) as failed:
                logger.warning("gh200: packs of cache %s were not written: %s", name, failed)
                continue
            if written:
                logger.info("gh200: cache %s: %s written to %s", name, format_bytes(written), packs.folder)

    def report(self) -> dict[str, Any]:
        """What every cache of this process did so far, by name: see ``docs/unified-caches.md``."""
        return {name: cache.report() | self._how(name) for name, cache in self.caches.items()}

    def _how(self, name: str) -> dict[str, Any]:
        how: dict[str, Any] = {
            "budget_bytes": self.shares[name],
            "bytes_for_all": self.selections[name].total_bytes,
            "filling": self._background.state if self._background is not None else "done",
        }
        if name in self.packs:
            how["packs"] = asdict(self.packs[name].report) | {"damaged": len(self.caches[name].damaged)}
        return how

    def close(self) -> None:
        if self._stop_filling():
            for cache in self.caches.values():
                cache.close()
        self.group.close()


class _Wishes:
    """Files that were asked for, or made, and are not held: taken in by a thread of their own, some at a time."""

    def __init__(self, grant: Callable[[Mapping[str, Sequence[str]], Pace], None]) -> None:
        self._grant = grant
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, None]] = {}
        self._job: BackgroundJob | None = None
        self._rounds = 0
        self._ended = threading.Event()
        self._pid = os.getpid()

    def add(self, name: str, path: str) -> None:
        if os.getpid() != self._pid:  # a forked child takes nothing in
            return
        with self._lock:
            self._waiting.setdefault(name, {})[path] = None
            if self._job is None and not self._ended.is_set():
                self._job = BackgroundJob(self._work, name="gh200-wishes")
                self._job.start()

    def _work(self, pace: BackgroundPace, _effort: Effort) -> None:
        try:
            while self._waiting and not self._ended.is_set():
                self._rounds += 1
                if not self._ended.wait(WISHES_WAIT * self._rounds):
                    self._grant(self.take(), pace)
        finally:
            with self._lock:  # what came since the last look waits for the next wish
                self._job = None

    def take(self) -> dict[str, list[str]]:
        with self._lock:
            wishes, self._waiting = self._waiting, {}
        return {name: list(paths) for name, paths in wishes.items()}

    def wait(self, timeout: float | None) -> bool:
        job = self._job
        return job is None or job.wait(timeout)

    def stop(self) -> bool:
        self._ended.set()
        job = self._job
        return job is None or job.stop()


def _neighbours(files: CacheListing, count: int = 128) -> Iterator[list[tuple[str, int]]]:
    some: list[tuple[str, int]] = []
    for one in files:
        some.append(one)
        if len(some) == count:
            yield some
            some = []
    yield some


@contextmanager
def opened(wanted: Iterable[Wanted], *, allowed: int | None = None) -> Iterator[Mapping[str, HeldCache]]:
    """Filled caches of a process by itself, for tools and benchmarks."""
    caches = Caches(wanted, allowed=allowed, group=NodeGroup.from_environment("tools", {}))
    try:
        caches.fill()
        yield caches.caches
    finally:
        caches.close()
