"""All caches of one process: made together with the other ranks of the node, filled, reported and closed together."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import cache_files, fill
from simpletuner_gh200.cache.pack_folder import Loaded, PackFolder, folder_for
from simpletuner_gh200.cache.plan import Plan, divide, plan
from simpletuner_gh200.cache.segment import SlabSource
from simpletuner_gh200.cache.segments import GROWTH
from simpletuner_gh200.cache.slots import key_of
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.telemetry.progress import progress
from simpletuner_gh200.units import MIB, format_bytes, format_seconds

logger = logging.getLogger("simpletuner_gh200")

HOST_SHARE = 0.8
"""Of what the host can spare, when no limit is set: the rest is for SimpleTuner's own growth."""

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
        workers: int = 0,
    ) -> None:
        """``tight``: slabs cost their whole size at once (registered memory), so make them no larger than needed.

        ``mappable``: slabs can be mapped again; false for managed memory, where hits are copies.
        """
        self.wanted = {want.name: want for want in wanted}
        self.packs = packs
        self._slabs = slabs
        self._tight = tight
        self._mappable = mappable
        self._growth = TIGHT_GROWTH if tight else GROWTH
        self._pack_folders: dict[str, PackFolder] = {}
        self._saving: threading.Thread | None = None
        self.loaded: dict[str, Loaded] = {}
        self.group = group
        self.workers = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self.files = {name: list(cache_files(want.folder)) for name, want in self.wanted.items()}
        self.allowed = allowed if allowed is not None else int(host_memory().available * HOST_SHARE)
        needs = {name: (len(files), sum(size for _, size in files)) for name, files in self.files.items()}
        shares = divide(needs, self.allowed)
        group.join()
        self.tables = {name: self._table(want, shares[name]) for name, want in self.wanted.items()}
        self.plans: dict[str, Plan] = {}
        for name, table in self.tables.items():
            self._decide(name, table)
        _live.add(self)

    def _table(self, want: Wanted, allowed: int | None) -> Table:
        shared = self.group.local_world_size > 1
        if self.group.is_leader:
            entries = max(len(self.files[want.name]), want.expected) + 256
            control = Control.create(entries, label=want.name, shared=shared)
            if shared:
                assert control.slab.fd is not None
                self.group.share(f"cache {want.name}", control.slab.fd)
        else:
            _, fds = self.group.receive(f"cache {want.name}")
            control = Control.attach(fds[0], label=want.name)
            os.close(fds[0])
        return Table(
            want.name,
            control,
            allowed=allowed,
            look_for_nan=want.look_for_nan,
            slabs=self._slabs,
            growth=self._growth,
            mappable=self._mappable,
        )

    def _decide(self, name: str, table: Table) -> None:
        chosen = plan([(key_of(path).high, size) for path, size in self.files[name]], table.allowed)
        self.plans[name] = chosen
        table.statistics.expected_hit_rate = chosen.expected_hit_rate
        if self.group.is_leader:
            table.control.threshold = chosen.threshold
            level = logging.INFO if chosen.complete else logging.WARNING
            logger.log(level, "gh200: cache %s", chosen.text(name))

    def fill(self, *, lazy: bool = False) -> None:
        """Take in what is on disk, packs first; each rank of the node does its part of the rest.

        ``lazy``: only the packs; other entries are taken in when they are first read.
        """
        if self.group.is_leader:
            self._load_packs()
            self.group.share("packs loaded")
        elif self.group.local_world_size > 1:
            self.group.receive("packs loaded")
        share = self.group.local_rank, self.group.local_world_size
        for name, table in self.tables.items() if not lazy else ():
            files = self.files[name]
            with progress(f"filling cache {name}", items=len(files)) as bar:
                fill(table, (path for path, _ in files), workers=self.workers, progress=bar, share=share)
        self.files = {name: [] for name in self.files}
        if self.group.is_leader and self.packs is not None:
            self._saving = threading.Thread(target=self._save_all, name="gh200-packs", daemon=True)
            self._saving.start()

    def _load_packs(self) -> None:
        if self.packs is None:
            return
        for name, table in self.tables.items():
            folder = self.wanted[name].folder
            packs = PackFolder(folder_for(self.packs, name, folder))
            packs.make(folder)
            self._pack_folders[name] = packs
            loaded = packs.load(table, copy=self._tight, workers=self.workers)
            table.statistics.fill_seconds += loaded.seconds
            self.loaded[name] = loaded
            if loaded.entries or loaded.damaged or loaded.changed:
                logger.info(
                    "gh200: cache %s: %d entries, %s, from packs in %s; %d had changed, %d were damaged",
                    name,
                    loaded.entries,
                    format_bytes(loaded.bytes),
                    format_seconds(loaded.seconds),
                    loaded.changed,
                    loaded.damaged,
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
            found["bytes_for_all"] = self.plans[name].total_bytes
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
