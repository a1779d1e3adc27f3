"""All caches of one process: made together with the other ranks of the node, filled, reported and closed together."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import cache_files, fill
from simpletuner_gh200.cache.plan import Plan, divide, plan
from simpletuner_gh200.cache.segment import SlabSource
from simpletuner_gh200.cache.slots import key_of
from simpletuner_gh200.cache.table import GROWTH, Table
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.telemetry.progress import progress
from simpletuner_gh200.units import MIB

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
        packs: Path | None = None,
        workers: int = 0,
    ) -> None:
        """``tight``: slabs cost their whole size at once (registered memory), so make them no larger than needed."""
        self.wanted = {want.name: want for want in wanted}
        self.packs = packs
        self._slabs = slabs
        self._growth = TIGHT_GROWTH if tight else GROWTH
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
        )

    def _decide(self, name: str, table: Table) -> None:
        chosen = plan([(key_of(path).high, size) for path, size in self.files[name]], table.allowed)
        self.plans[name] = chosen
        table.statistics.expected_hit_rate = chosen.expected_hit_rate
        if self.group.is_leader:
            table.control.threshold = chosen.threshold
            level = logging.INFO if chosen.complete else logging.WARNING
            logger.log(level, "gh200: cache %s", chosen.text(name))

    def fill(self) -> None:
        """Take in what is on disk; each rank of the node does its part of the keys."""
        share = self.group.local_rank, self.group.local_world_size
        for name, table in self.tables.items():
            files = self.files[name]
            with progress(f"filling cache {name}", items=len(files)) as bar:
                fill(table, (path for path, _ in files), workers=self.workers, progress=bar, share=share)
        self.files = {name: [] for name in self.files}

    def save(self) -> None:
        """Write what is new to the packs."""

    def report(self) -> dict[str, Any]:
        tables = {name: table.report() for name, table in self.tables.items()}
        for name, found in tables.items():
            found["budget_bytes"] = self.tables[name].allowed
            found["bytes_for_all"] = self.plans[name].total_bytes
        return tables

    def close(self) -> None:
        for table in self.tables.values():
            table.close()
        self.group.close()


@contextmanager
def opened(wanted: Iterable[Wanted], *, allowed: int | None = None) -> Iterator[Mapping[str, Table]]:
    """Filled caches of a process by itself, for tools and benchmarks."""
    caches = Caches(wanted, allowed=allowed, group=NodeGroup.from_environment("tools", {}))
    try:
        caches.fill()
        yield caches.tables
    finally:
        caches.close()
