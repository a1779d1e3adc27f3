"""All caches of one process: made together with the other ranks of the node, filled, reported and closed together."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.fill import Filler
from simpletuner_gh200.held.listing import CacheListing, cache_files
from simpletuner_gh200.held.pack_place import PackPlace, folder_for
from simpletuner_gh200.held.packs import PackFolder
from simpletuner_gh200.held.segment import key_of, keys_of, words_of_keys
from simpletuner_gh200.held.shelf import Board, Shelf
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.background import AT_ONCE, BackgroundJob, BackgroundPace, Effort, Pace
from simpletuner_gh200.memory.ceilings import caches_allowance, divide
from simpletuner_gh200.memory.driver.detect import single_pool
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.telemetry.progress import progress
from simpletuner_gh200.units import counted, format_bytes

logger = logging.getLogger("simpletuner_gh200")

MOST_WORKERS = 72

NEIGHBOURS = 128
"""Files whose keys are made together."""

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
    kept: int
    """Entries."""
    total: int
    total_bytes: int
    """About: the sizes of some files stand for all."""
    allowed: int

    @property
    def expected_hit_rate(self) -> float:
        return self.kept / self.total if self.total else 1.0

    def text(self, name: str) -> str:
        """One log line for people."""
        held = f"{self.kept} of {counted(self.total, 'entry', 'entries')}"
        if self.kept == self.total:
            return f"{name}: all {held}, {format_bytes(self.total_bytes)}"
        return (
            f"{name}: {held} fit the budget of {format_bytes(self.allowed)}; expected hit rate "
            f"{self.expected_hit_rate:.1%}, the rest comes from disk. {format_bytes(self.total_bytes)} would hold all "
            f"(cache_config.memory_limit_gb)"
        )


def threshold_for(size: int, allowed: int) -> int:
    """Keys are spread evenly: this part of them has so many of the bytes, about. The filler keeps to the budget."""
    return EVERYTHING if size <= allowed else EVERYTHING * allowed // size


class ServedCache:
    """One of them: its files, its packs, its share of the budget, and what fills it."""

    def __init__(
        self, want: Wanted, files: CacheListing, group: NodeGroup, board: Board, share: int, maker: SlabMaker | None
    ) -> None:
        self.want, self.files, self.share = want, files, share
        self.packs: PackFolder | None = None
        self._group = group
        shelf = Shelf(board, rank=group.local_rank, attach=lambda fd: self.filler.attach(fd))
        self.cache = HeldCache(want.name, shelf, look_for_nan=want.look_for_nan)
        self.filler = Filler(self.cache, allowed=share // group.local_world_size, maker=maker)
        self.selection = Selection(EVERYTHING, files.count, files.count, files.size, share)

    def open_packs(self, root: Path, keep_free: int) -> None:
        """Every rank serves what is in packs from the first moment; the leader makes their folder, and writes them."""
        name, shelf = self.want.name, self.cache.shelf
        packs = PackFolder(folder_for(root, name, self.want.folder), self.want.made_by, keep_free=keep_free)
        try:
            if self._group.is_leader:
                PackPlace.make(packs.folder, self.want.folder)
            segments = packs.open_all()
        except FileNotFoundError:  # in another rank the folder may not be made yet, and then there is nothing in it
            return
        except (CacheError, OSError) as refused:
            logger.warning("gh200: cache %s runs without packs: %s", name, refused)
            return
        self.packs = packs
        for segment in segments:
            shelf.add(segment)
        if segments or packs.of_others:
            words = "gh200: cache %s: %d entries at hand in packs, %d were made by another configuration"
            logger.info(words, name, len(shelf), packs.of_others)

    def select(self, *, copies: bool) -> None:
        """Of what takes memory: all of it where a device ``copies`` from there, else what no pack has."""
        files, shelf, chosen = self.files, self.cache.shelf, self.selection
        if files.size > self.share:
            keys = [key_of(path) for path in files.paths()]
            lacking = words_of_keys([key for key in keys if copies or key not in shelf])
            threshold = threshold_for(files.size * len(lacking) // files.count, self.share)
            kept = files.count - int((lacking[:, 1] > np.uint64(threshold)).sum())
            chosen = self.selection = replace(chosen, threshold=threshold, kept=kept)
        self.cache.statistics.expected_hit_rate = chosen.expected_hit_rate
        if self._group.is_leader:
            level = logging.INFO if chosen.kept == chosen.total else logging.WARNING
            logger.log(level, "gh200: cache %s", chosen.text(self.want.name))

    def fill(self, workers: int, pace: Pace) -> None:
        """This rank's part of what is on disk and in no pack."""
        lacking = self._lacking(pace)
        size = self.files.size * len(lacking) // max(self.files.count, 1)
        self.files = CacheListing()
        name, quiet = f"filling cache {self.want.name}", pace is not AT_ONCE
        with progress(name, items=len(lacking), size=size, quiet=quiet) as shown:
            self.filler.fill(lacking, workers=workers, progress=shown, pace=pace)

    def _lacking(self, pace: Pace) -> list[str]:
        """Of this rank's part of the files: those that are wanted and not held."""
        parts, part = np.uint64(self._group.local_world_size), self._group.local_rank
        threshold, lacking, listed = np.uint64(self.selection.threshold), list[str](), self.files.paths()
        while not pace.ended and (some := list(islice(listed, NEIGHBOURS))):
            keys = keys_of(some)
            for number in np.flatnonzero((keys[:, 0] % parts == part) & (keys[:, 1] <= threshold)).tolist():
                if keys[number].tobytes() not in self.cache.shelf:
                    lacking.append(some[number])
            pace.rest(0)
        return lacking

    def copy_from_packs(self, pace: Pace) -> None:
        """Into memory what a device copies from there: this rank's part."""
        ranks, rank = self._group.local_world_size, self._group.local_rank
        for _key, segment, row in self.cache.shelf.current():
            if pace.ended or self.filler.full:
                break
            if segment.is_pack and int(segment.rows["key_low"][row]) % ranks == rank:
                self.filler.copy_from_pack(segment.path(row))
                pace.rest(0)
        self.filler.seal()

    def grant(self, paths: Sequence[str], pace: Pace) -> None:
        """Take in files that were asked for, or made, while training runs."""
        threshold = self.selection.threshold
        admitted = [path for path in paths if int.from_bytes(key_of(path)[8:], "little") <= threshold]
        if len(admitted) < len(paths):
            self.cache.statistics.fall_back("not in the subset that fits", len(paths) - len(admitted))
        self.filler.fill(admitted, pace=pace)

    def save(self, stop: Callable[[], bool]) -> None:
        if self.packs is None:
            return
        try:
            written = self.packs.save(self.cache, stop)
        except (CacheError, OSError) as failed:
            logger.warning("gh200: packs of cache %s were not written: %s", self.want.name, failed)
            return
        if written:
            logger.info("gh200: cache %s: %s written to %s", self.want.name, format_bytes(written), self.packs.folder)

    def report(self, filling: str) -> dict[str, Any]:
        sizes = {"budget_bytes": self.share, "bytes_for_all": self.selection.total_bytes, "filling": filling}
        packs = {} if self.packs is None else {"packs": self.packs.report() | {"damaged": len(self.cache.damaged)}}
        return self.cache.report() | sizes | packs


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
        self.group = group
        self.workers = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self._copies = copies
        self._stop_saving = threading.Event()
        self._background: BackgroundJob | None = None
        self._wishes = _Wishes(self._grant)
        group.join()  # before the first long work, so that whoever waits hears that this rank lives
        listed = [(want, cache_files(want.folder, group.beat)) for want in wanted]
        host = host_memory()
        left = replace(host, available=max(host.available - promised, 0))
        self.allowed = caches_allowance(allowed, left, single_pool=single_pool())
        self._complete = _bytes_when_complete(listed)
        shares = divide({want.name: (files.count, files.size) for want, files in listed}, self.allowed)
        boards = _boards(group, len(listed))
        self.served = {
            want.name: ServedCache(want, files, group, board, shares[want.name], maker)
            for (want, files), board in zip(listed, boards, strict=True)
        }
        for served in self.served.values():
            served.cache.wish = partial(self._wishes.add, served.want.name)
            if packs is not None:
                served.open_packs(packs, keep_free)
            served.select(copies=copies)
        self.caches = {name: served.cache for name, served in self.served.items()}

    @property
    def memory_to_come(self) -> int:
        """Host bytes that the caches of this node may still take."""
        whole = self.allowed if self._complete is None else min(self.allowed, self._complete)
        return max(whole - sum(cache.held_bytes for cache in self.caches.values()), 0)

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

    def _fill(self, workers: int, pace: Pace) -> None:
        for served in self.served.values():
            served.fill(workers, pace)

    def _fill_in_background(self, pace: BackgroundPace, effort: Effort) -> None:
        self._fill(effort.threads, pace)
        self._settle(pace, effort)

    def _settle(self, pace: BackgroundPace, _effort: Effort) -> None:
        """Into memory what a device copies from there; into packs what they lack."""
        for served in self.served.values() if self._copies else ():
            served.copy_from_packs(pace)
        if self.group.is_leader and not pace.ended:
            self._save_all(pace)

    def _grant(self, wishes: Mapping[str, Sequence[str]], pace: Pace) -> None:
        for name, paths in wishes.items():
            self.served[name].grant(paths, pace)

    def drop(self, name: str) -> None:
        """SimpleTuner makes a cache anew: what is held of it is of no use any more, and there is room again."""
        self.caches[name].drop()
        self.served[name].filler.drop()

    # -- ending ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write to the packs what they lack; the leader does it for the node. Filling in the background ends."""
        try:
            if self._stop_filling() and self.group.is_leader:
                self._grant(self._wishes.take(), AT_ONCE)
                for cache in self.caches.values():
                    cache.shelf.refresh()  # the others are about to end, and what they filled goes with them
                self._save_all(AT_ONCE)
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

    def _save_all(self, pace: Pace) -> None:
        def stop() -> bool:
            pace.rest(0)  # not at all once the run has ended, and whoever ends it waits for its packs
            return self._stop_saving.is_set()

        for served in self.served.values():
            served.save(stop)

    def report(self) -> dict[str, Any]:
        """What every cache of this process did so far, by name: see ``docs/unified-caches.md``."""
        filling = self._background.state if self._background is not None else "done"
        return {name: served.report(filling) for name, served in self.served.items()}

    def close(self) -> None:
        if self._stop_filling():
            for cache in self.caches.values():
                cache.close()
        self.group.close()


def _boards(group: NodeGroup, count: int) -> list[Board]:
    """One for each cache: made by the leader, mapped by every rank."""
    if not group.is_leader:
        return list(map(Board.attach, group.receive("caches")[1]))
    boards = [Board.create(group.local_world_size) for _ in range(count)]
    group.share("caches", *(board.fd for board in boards))
    return boards


def _bytes_when_complete(listed: Iterable[tuple[Wanted, CacheListing]]) -> int | None:
    """Of all caches, with entries yet to be made as large as those on disk; None where there are none to tell."""
    total = 0
    for want, files in listed:
        expected = max(files.count, want.expected)
        if expected and not files.count:
            return None
        total += files.size * expected // max(files.count, 1)
    return total


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


@contextmanager
def opened(wanted: Iterable[Wanted], *, allowed: int | None = None) -> Iterator[Mapping[str, HeldCache]]:
    """Filled caches of a process by itself, for tools and benchmarks."""
    caches = Caches(wanted, allowed=allowed, group=NodeGroup.from_environment("tools", {}))
    try:
        caches.fill()
        yield caches.caches
    finally:
        caches.close()
