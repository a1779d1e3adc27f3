"""All caches of one process: made together with the other ranks of the node, filled, reported and closed together."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import cache_files, fill
from simpletuner_gh200.cache.pack_contents import Loaded
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.pack_place import folder_for
from simpletuner_gh200.cache.segment import SlabSource
from simpletuner_gh200.cache.segments import GROWTH
from simpletuner_gh200.cache.sizing import Selection, agree, select
from simpletuner_gh200.cache.slots import key_of
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.memory.ceilings import caches_allowance, divide
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.numa import Node, read_nodes
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.telemetry.progress import progress
from simpletuner_gh200.units import MIB, format_bytes, format_seconds

logger = logging.getLogger("simpletuner_gh200")

MOST_WORKERS = 72

TIGHT_GROWTH = 64 * MIB


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
        packs: Path | None = None,
        keep_free: int = 0,
        workers: int = 0,
        near: int | None = None,
        memory_nodes: Callable[[], Sequence[Node]] = read_nodes,
    ) -> None:
        """``tight``: slabs cost their whole size at once (registered memory), so make them no larger than needed.

        ``mappable``: slabs can be mapped again; false for managed memory, where hits are copies.
        ``keep_free``: bytes of the disk that packs leave to others, where that is more than their own rule.
        ``near``: the memory node beside this rank's GPU; ranks beside different ones have a copy each if that fits.
        """
        self.wanted = {want.name: want for want in wanted}
        self.packs = packs
        self._keep_free = keep_free
        self._slabs = slabs
        self._mappable = mappable
        self._growth = TIGHT_GROWTH if tight else GROWTH
        self._pack_folders: dict[str, PackFolder] = {}
        self._saving: threading.Thread | None = None
        self.loaded: dict[str, Loaded] = {}
        self.group = group
        self.workers = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self.files = {name: list(cache_files(want.folder)) for name, want in self.wanted.items()}
        self.allowed = caches_allowance(allowed, host_memory().available)
        needs = {name: (len(files), sum(size for _, size in files)) for name, files in self.files.items()}
        group.join()
        self.copies = agree(group, near, self._bytes_when_complete(needs), self.allowed, memory_nodes)
        shares = divide(needs, self.allowed // len(self.copies.groups))
        self.tables = {name: self._table(want, shares[name]) for name, want in self.wanted.items()}
        self.selections: dict[str, Selection] = {}
        for name, table in self.tables.items():
            self._decide(name, table)
        _live.add(self)

    def _bytes_when_complete(self, needs: Mapping[str, tuple[int, int]]) -> int | None:
        """Of all caches, with entries yet to be made as large as those on disk; None where there are none to tell."""
        total = 0
        for name, (entries, size) in needs.items():
            expected = max(entries, self.wanted[name].expected)
            if expected and not entries:
                return None
            total += size * expected // max(entries, 1)
        return total

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
        entries = max(len(self.files[want.name]), want.expected) + 256
        controls = [Control.create(entries, label=want.name, shared=shared) for _ in self.copies.groups]
        if shared:
            self.group.share(f"cache {want.name}", *(control.fd for control in controls))
        return controls

    def _decide(self, name: str, table: Table) -> None:
        chosen = select([(key_of(path).high, size) for path, size in self.files[name]], table.allowed)
        self.selections[name] = chosen
        table.statistics.expected_hit_rate = chosen.expected_hit_rate
        if self.group.is_leader:
            table.set_threshold(chosen.threshold)
            level = logging.INFO if chosen.complete else logging.WARNING
            logger.log(level, "gh200: cache %s", chosen.text(name))

    def fill(self, *, lazy: bool = False) -> None:
        """Take in what is on disk, packs first; each rank does its part of the rest of its copy.

        ``lazy``: only the packs; other entries are taken in when they are first read.
        """
        share = self.copies.position(self.group.local_rank)
        if share[0] == 0:
            self._load_packs()
        self._wait_for_all("packs loaded")
        for name, table in self.tables.items() if not lazy else ():
            files = self.files[name]
            with progress(f"filling cache {name}", items=len(files)) as bar:
                fill(table, (path for path, _ in files), workers=self.workers, progress=bar, share=share)
        self.files = {name: [] for name in self.files}
        if self.group.is_leader and self.packs is not None:
            self._saving = threading.Thread(target=self._save_all, name="gh200-packs", daemon=True)
            self._saving.start()

    def _wait_for_all(self, point: str) -> None:
        if self.group.is_leader:
            self.group.hear(point)
            self.group.share(point)
        else:
            self.group.tell(point)
            self.group.receive(point)

    def _load_packs(self) -> None:
        if self.packs is None:
            return
        for name, table in self.tables.items():
            want = self.wanted[name]
            packs = PackFolder(folder_for(self.packs, name, want.folder), want.made_by, keep_free=self._keep_free)
            try:
                packs.make(want.folder)
                loaded = packs.load(table, workers=self.workers)
            except (CacheError, OSError) as refused:
                logger.warning("gh200: cache %s goes without packs: %s", name, refused)
                continue
            self._pack_folders[name] = packs
            table.statistics.fill_seconds += loaded.seconds
            self.loaded[name] = loaded
            if loaded.entries or loaded.damaged or loaded.changed or loaded.of_others:
                logger.info(
                    "gh200: cache %s: %d entries, %s, from packs in %s; %d had changed, %d were damaged, "
                    "%d were made by another configuration",
                    name,
                    loaded.entries,
                    format_bytes(loaded.bytes),
                    format_seconds(loaded.seconds),
                    loaded.changed,
                    loaded.damaged,
                    loaded.of_others,
                )

    def save(self) -> None:
        """Write to the packs what they lack; the leader does it for the node."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
            self._save_all()

    def _save_all(self) -> None:
        for name, packs in self._pack_folders.items():
            table = self.tables[name]
            try:
                written = packs.save(table, (path for path, _ in cache_files(self.wanted[name].folder)))
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
            if name in self.loaded:
                found["packs"] = asdict(self.loaded[name])
        return tables

    def close(self) -> None:
        _live.discard(self)
        for table in self.tables.values():
            table.close()
        self.group.close()


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
