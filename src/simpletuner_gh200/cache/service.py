"""All caches of one process: made together with the other ranks of the node, filled, reported and closed together."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import HANDED_OUT, fill
from simpletuner_gh200.cache.listing import CacheListing, cache_files
from simpletuner_gh200.cache.pack_contents import Loaded
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.pack_place import folder_for
from simpletuner_gh200.cache.pack_reading import PackIndex
from simpletuner_gh200.cache.segment import SlabSource
from simpletuner_gh200.cache.segments import GROWTH
from simpletuner_gh200.cache.sizing import Selection, agree, everything, select
from simpletuner_gh200.cache.slots import key_of, keys_of
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.memory.background import BackgroundJob
from simpletuner_gh200.memory.ceilings import caches_allowance, divide
from simpletuner_gh200.memory.driver.detect import single_pool
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.numa import Node, read_nodes
from simpletuner_gh200.memory.pace import AT_ONCE, BackgroundPace, Effort, Pace
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.telemetry.progress import progress
from simpletuner_gh200.units import MIB, format_bytes, format_seconds

logger = logging.getLogger("simpletuner_gh200")

MOST_WORKERS = 72

TIGHT_GROWTH = 64 * MIB

NO_DOUBT = 2
"""So many times over must caches fit for their size to be taken from a sample of their files."""

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


class Caches:
    """Collective: every rank of the node makes it with the same list, in the same order."""

    def __init__(
        self,
        wanted: Iterable[Wanted],
        *,
        allowed: int | None,
        group: NodeGroup,
        slabs: SlabSource | None = None,
        tight: bool = False,
        mappable: bool = True,
        copies: bool = False,
        packs: Path | None = None,
        keep_free: int = 0,
        workers: int = 0,
        near: int | None = None,
        promised: int = 0,
        memory_nodes: Callable[[], Sequence[Node]] = read_nodes,
    ) -> None:
        """``tight``: slabs cost their whole size at once (registered memory), so make them no larger than needed.

        ``mappable``: slabs can be mapped again; false for managed memory, where hits are copies.
        ``copies``: a device copies from slabs, so entries of packs go there, behind the run; else they stay in packs.
        ``keep_free``: bytes of the disk that packs leave to others, where that is more than their own rule.
        ``near``: the memory node beside this rank's GPU; ranks beside different ones have a copy each if that fits.
        ``promised``: bytes of the host that others will still take; they count where no limit is set.
        """
        self.wanted = {want.name: want for want in wanted}
        self.packs = packs
        self._keep_free = keep_free
        self._slabs = slabs
        self._mappable = mappable
        self._copies = copies
        self._growth = TIGHT_GROWTH if tight else GROWTH
        self._pack_folders: dict[str, PackFolder] = {}
        self._stop_saving = threading.Event()
        self._background: BackgroundJob | None = None
        self._indexes: list[PackIndex] = []
        self.loaded: dict[str, Loaded] = {}
        self.group = group
        self.workers = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        group.join()  # before the first long work, so that whoever waits hears that this rank lives
        self.files = {name: cache_files(want.folder, group.beat) for name, want in self.wanted.items()}
        host = host_memory()
        left = replace(host, available=max(host.available - promised, 0))
        self.allowed = caches_allowance(allowed, left, single_pool=single_pool())
        needs = self._needs()
        self._complete = self._bytes_when_complete(needs)
        self.copies = agree(group, near, self._complete, self.allowed, memory_nodes)
        shares = divide(needs, self.allowed // len(self.copies.groups))
        self.tables = {name: self._table(want, shares[name]) for name, want in self.wanted.items()}
        self.selections: dict[str, Selection] = {}
        for name, table in self.tables.items():
            self._decide(name, table)
        _live.add(self)

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
        whole = self.allowed if self._complete is None else min(self.allowed, self._complete * len(self.copies.groups))
        return max(whole - sum(table.control.held for table in self.tables.values()), 0)

    def _table(self, want: Wanted, allowed: int | None) -> Table:
        controls = self._controls(want)
        return Table(
            want.name,
            controls.pop(self.copies.of(self.group.local_rank)),
            elsewhere=controls,
            allowed=allowed,
            look_for_nan=want.look_for_nan,
            slabs=self._slabs,
            growth=self._growth,
            mappable=self._mappable,
            copies=self._copies,
        )

    def _controls(self, want: Wanted) -> list[Control]:
        """The control blocks of all copies: made by the leader, mapped by every rank."""
        shared = self.group.local_world_size > 1
        if not self.group.is_leader:
            _, fds = self.group.receive(f"cache {want.name}")
            controls = [Control.attach(fd, label=want.name) for fd in fds]
            for fd in fds:
                os.close(fd)
            return controls
        entries = max(self.files[want.name].count, want.expected) + 256
        controls = [Control.create(entries, label=want.name, shared=shared) for _ in self.copies.groups]
        if shared:
            self.group.share(f"cache {want.name}", *(control.fd for control in controls))
        return controls

    def _decide(self, name: str, table: Table) -> None:
        chosen = self._select(name, table.allowed)
        self.selections[name] = chosen
        table.statistics.expected_hit_rate = chosen.expected_hit_rate
        if self.group.is_leader:
            table.set_threshold(chosen.threshold)
            level = logging.INFO if chosen.complete else logging.WARNING
            logger.log(level, "gh200: cache %s", chosen.text(name))

    def _select(self, name: str, allowed: int | None) -> Selection:
        files = self.files[name]
        size = files.size
        if allowed is None or size <= (allowed if files.measured else allowed // NO_DOUBT):
            return everything(files.count, size, allowed)  # then nobody need know which is which
        return select([(key_of(path).high, size) for path, size in files], allowed)

    def fill(self, when: FillTime = "start", *, later: bool = False) -> None:
        """Take in what is on disk, packs first; each rank does its part of its copy.

        ``start``: returns when all is in packs or memory. ``background``: returns at once; entries are served as they
        come, and what is asked for before that is taken from a pack, or from SimpleTuner's file. ``lazy``: only what is
        asked for; its packs are written at the end. ``later``: what is done in the background waits for ``go_on``.
        """
        self._open_packs()
        if when == "start":
            self._fill(self.workers, AT_ONCE)
        else:
            self._serve_from_packs()
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
        return self._background is None or self._background.wait(timeout)

    def _fill_in_background(self, pace: BackgroundPace, effort: Effort) -> None:
        self._fill(effort.threads, pace)
        self._settle(pace, effort)

    def _settle(self, pace: BackgroundPace, _effort: Effort) -> None:
        """Into slabs what a device copies from there, each rank its part; into packs what they lack."""
        part, parts = self.copies.position(self.group.local_rank)
        for name, packs in self._pack_folders.items() if self._copies else ():
            for path in list(packs.held):
                if pace.ended:
                    return
                if key_of(path).low % parts == part:
                    self.tables[name].find(path)
                pace.rest(0)
        if self.group.is_leader and self.packs is not None and not pace.ended:
            self._save_all(pace)

    def _fill(self, workers: int, pace: Pace) -> None:
        share = self.copies.position(self.group.local_rank)
        quiet = pace is not AT_ONCE
        for name in self.tables:
            self._load_packs(name, share, workers, pace, quiet=quiet)
        if not quiet:
            self.group.meet("packs loaded")
        for name, table in self.tables.items():
            self._measure(name, table)
            lacking, total = self._lacking(name, table, share, pace)
            with progress(f"filling cache {name}", items=len(lacking), size=total, quiet=quiet) as shown:
                fill(table, lacking, workers=workers, progress=shown, pace=pace)

    def _lacking(self, name: str, table: Table, share: tuple[int, int], pace: Pace) -> tuple[list[str], int]:
        """Of this rank's part of the files: those that the table lacks, and the bytes they have together."""
        (part, parts), files = share, iter(self.files.pop(name, CacheListing()))
        lacking: list[str] = []
        total = 0
        while not pace.ended and (some := list(islice(files, HANDED_OUT))):
            keys = keys_of([path for path, _ in some])
            wanted = table.lacks(keys) & (keys[:, 0] % np.uint64(parts) == part)
            chosen = [some[number] for number in np.flatnonzero(wanted).tolist()]
            lacking += [path for path, _ in chosen]
            total += sum(size for _, size in chosen)
            pace.rest(0)
        return lacking, total

    def _measure(self, name: str, table: Table) -> None:
        """Where sizes were taken from a sample: know them, and choose again if the sample was mistaken."""
        files = self.files.get(name)
        if files is not None and not files.measured:
            files.measure()
            if table.allowed is not None and files.size > table.allowed:
                self._decide(name, table)

    def _open_packs(self) -> None:
        """Every rank reads from packs; the leader makes their folders, and writes them."""
        for name, want in self.wanted.items() if self.packs is not None else ():
            assert self.packs is not None
            packs = PackFolder(folder_for(self.packs, name, want.folder), want.made_by, keep_free=self._keep_free)
            try:
                if self.group.is_leader:
                    packs.make(want.folder)
            except (CacheError, OSError) as refused:
                logger.warning("gh200: cache %s goes without packs: %s", name, refused)
                continue
            self._pack_folders[name] = packs

    def _serve_from_packs(self) -> None:
        for name, packs in self._pack_folders.items():
            try:
                index = packs.open_index()
            except (CacheError, OSError):  # said by whoever loads them; in another rank the folder may not be made yet
                continue
            self._indexes.append(index)
            if len(index):
                logger.info("gh200: cache %s: %d entries at hand in packs", name, len(index))
                self.tables[name].backing = index.take

    def _load_packs(self, name: str, share: tuple[int, int], workers: int, pace: Pace, *, quiet: bool) -> None:
        packs, table = self._pack_folders.get(name), self.tables[name]
        if packs is None:
            return
        try:
            with progress(f"loading packs of cache {name}", quiet=quiet) as shown:
                beat = _no_beat if quiet else self.group.beat  # nobody waits for what goes on in the background
                loaded = packs.load(table, workers=workers, share=share, pace=pace, progress=shown, tick=beat)
        except FileNotFoundError:  # in a rank that doesn't make it
            return
        except (CacheError, OSError) as refused:
            logger.warning("gh200: cache %s goes without packs: %s", name, refused)
            del self._pack_folders[name]
            return
        if not pace.ended:
            table.backing = None
        table.statistics.fill_seconds += loaded.seconds
        self.loaded[name] = loaded
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

    def save(self) -> None:
        """Write to the packs what they lack; the leader does it for the node. Filling in the background ends."""
        try:
            if self.group.is_leader:  # the others are about to end, and what they filled with them
                for table in self.tables.values():
                    table.hold_all()
            if self._stop_filling() and self.group.is_leader:
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
        if self._background is not None and not self._background.stop():
            return False
        for table in self.tables.values():
            table.backing = None
        for index in self._indexes:
            index.close()
        self._indexes = []
        return True

    def _save_all(self, pace: Pace = AT_ONCE) -> None:
        def stop() -> bool:
            pace.rest(0)  # not at all once the run has ended, and whoever ends it waits for its packs
            return self._stop_saving.is_set()

        for name, packs in self._pack_folders.items():
            table = self.tables[name]
            try:
                files = cache_files(self.wanted[name].folder)
                written = packs.save(table, files.paths(), stop=stop)
            except (CacheError, OSError) as failed:
                logger.warning("gh200: packs of cache %s were not written: %s", name, failed)
                continue
            if written:
                logger.info("gh200: cache %s: %s written to %s", name, format_bytes(written), packs.folder)

    def report(self) -> dict[str, Any]:
        tables = {name: table.report() for name, table in self.tables.items()}
        for name, found in tables.items():
            found["budget_bytes"] = self.tables[name].allowed
            found["bytes_for_all"] = self.selections[name].total_bytes
            found["copies_on_node"] = len(self.copies.groups)
            found["filling"] = self._background.state if self._background is not None else "done"
            if name in self.loaded:
                found["packs"] = asdict(self.loaded[name]) | {"damaged": len(self.tables[name].damaged)}
        return tables

    def close(self) -> None:
        _live.discard(self)
        if self._stop_filling():
            for table in self.tables.values():
                table.close()
        self.group.close()


def _no_beat() -> None: ...


_live: weakref.WeakSet[Caches] = weakref.WeakSet()


def statistics() -> dict[str, Any]:
    """What every cache of this process did so far, by name: see ``docs/unified-caches.md``."""
    return {name: report for caches in _live for name, report in caches.report().items()}


@contextmanager
def opened(wanted: Iterable[Wanted], *, allowed: int | None = None) -> Iterator[Mapping[str, Table]]:
    """Filled caches of a process by itself, for tools and benchmarks."""
    caches = Caches(wanted, allowed=allowed, group=NodeGroup.from_environment("tools", {}))
    try:
        caches.fill()
        yield caches.tables
    finally:
        caches.close()
