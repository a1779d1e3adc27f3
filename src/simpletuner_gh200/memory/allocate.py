"""Making slabs: kind, mapping, NUMA binding, registration, advice; undone in reverse if a step fails.

>>> maker = SlabMaker(current(), asked="auto")
>>> slab = maker.make(size, label="latents", shared=True)
>>> maker.records[-1]                                   # what was made, and why
"""

from __future__ import annotations

import logging
import os
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from simpletuner_gh200.errors import DriverError, MemoryRoomError
from simpletuner_gh200.memory import advice, numa
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.host import ROOT, last_level_cache
from simpletuner_gh200.memory.mapping import PAGE, Region, map_file
from simpletuner_gh200.memory.placement import Asked, SlabChoice, choose_kind
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.memory.slab import Slab, SlabKind
from simpletuner_gh200.units import MIB

logger = logging.getLogger("simpletuner_gh200")


@dataclass(frozen=True)
class SlabRecord:
    """One slab as it was made: for doctor, summary and the curious. Torch's own statistics don't show slabs."""

    label: str
    size: int
    kind: SlabKind
    reason: str
    binding: str
    advice: str


KEPT_RECORDS = 256
LEAST_MEASURED = 256 * MIB
MEASURED_TIMES = 5


class SlabMaker:
    """Makes the slabs of one rank, all of one kind choice. ``records`` are its latest, closed or not."""

    def __init__(
        self,
        driver: Driver,
        *,
        asked: Asked = "auto",
        ordinal: int | None = None,
        measured: Mapping[SlabKind, float] | None = None,
        near: int | None = None,
    ) -> None:
        """Raises FeatureUnavailable at once when the kind asked for can't be had.

        ``measured`` is what ``copy_speeds`` found; by default ``auto`` measures by itself where kinds can be compared.
        ``near`` is the memory node to be on, by default the one beside the device.
        """
        self.driver = driver
        self.ordinal = ordinal = driver.home if ordinal is None else ordinal
        self.asked = asked
        self.caps = driver.capabilities(ordinal)
        self._near = self.caps.host_node if near is None else near
        if measured is None and asked == "auto":
            measured = copy_speeds(driver, ordinal)
        self.choice = choose_kind(asked, self.caps, measured=measured)
        self.records: deque[SlabRecord] = deque(maxlen=KEPT_RECORDS)
        logger.info("gh200: slabs are %s memory: %s", self.choice.kind, self.choice.reason)

    def make(self, size: int, *, label: str, shared: bool = False) -> Slab:
        """A slab of exactly ``size`` bytes. ``shared`` puts it behind a memfd for other ranks."""
        return self._finish(Slab.shared(size, label=label) if shared else Slab.anonymous(size, label=label))

    def prepare(self, fd: int, size: int) -> None:
        """Have the pages of an empty memfd taken from the right memory, whoever writes them; it is ``size`` large then.

        The policy belongs to the memory, not to this mapping of it.
        """
        os.ftruncate(fd, size)
        self._bind(map_file(fd, size))

    def attach(self, fd: int, size: int, *, label: str) -> Slab:
        """Map what a rank of the node has made, and register this mapping."""
        return self._finish(Slab.attach(fd, size, label=label), bound="by the rank that made it")

    def _finish(self, slab: Slab, *, bound: str | None = None) -> Slab:
        try:
            bound = bound or self._bind(slab.region)
            choice = self._register(slab)
        except BaseException:
            slab.close()
            raise
        slab.kind = choice.kind
        advised = self._advise(slab).reason
        self.records.append(SlabRecord(slab.label, slab.size, choice.kind, choice.reason, bound, advised))
        return slab

    def _bind(self, region: Region) -> str:
        return numa.bind(region.address, region.size, near=self._near, device_node=self.caps.device_node)

    def _register(self, slab: Slab) -> SlabChoice:
        if self.choice.kind != "registered":
            return self.choice
        try:
            self.driver.register_host(slab.address, slab.size, self.ordinal)
        except DriverError as refused:
            if self.asked != "auto":
                raise
            logger.warning("gh200: slab %r stays plain host memory: %s", slab.label, str(refused))
            return SlabChoice("host", f"registering failed: {refused.message}")
        slab.region.before_release(partial(_unregister, self.driver, slab.address, self.ordinal, os.getpid()))
        return self.choice

    def _advise(self, slab: Slab) -> advice.Advised:
        if slab.kind == "registered" and not self.caps.host_page_tables:
            return advice.Advised(False, "pinned memory never moves: none needed")
        # The mapping is whole pages, whatever the slab's size: the last one is ours too.
        page = self.caps.page_size
        outcome = advice.prefer(self.driver, self.caps, (slab.address, -(-slab.size // page) * page), "cpu")
        return replace(outcome, size=slab.size) if outcome else outcome


def _unregister(driver: Driver, address: int, ordinal: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the registration is the parent's
        driver.unregister_host(address, ordinal)


# -- how fast the device copies from each kind of host memory, so that auto needn't guess -------------------


def measured_size(root: Path = ROOT) -> int:
    """Of a copy that says something about memory: twice what the CPU's own cache could answer for, or more."""
    return max(LEAST_MEASURED, 2 * last_level_cache(root))


def node_speeds(group: NodeGroup, driver: Driver, ordinal: int) -> dict[SlabKind, float]:
    """Collective: the leader measures for the node, so that its ranks choose alike, whatever each would have seen."""
    group.join()
    if group.is_leader:
        found = copy_speeds(driver, ordinal)
        group.share("copy speeds", note={"speeds": found})
        return found
    told = group.receive("copy speeds")[0]["speeds"]
    assert isinstance(told, dict)
    return told


def copy_speeds(driver: Driver, ordinal: int, *, size: int | None = None) -> dict[SlabKind, float]:
    """Bytes per second from plain and from registered memory; empty where there is nothing to compare or measure.

    From what training copies from: shared memory, on the node that slabs are bound to, the same pages both times.
    """
    caps = driver.capabilities(ordinal)
    if caps.mode == "none" or not caps.pageable_access or not caps.host_register:
        return {}
    size = size or measured_size()
    try:
        maker = SlabMaker(driver, asked="host", ordinal=ordinal)
        with maker.make(size, label="measured", shared=True) as slab:
            slab.array[::PAGE] = 1  # a page that was never touched has no place yet
            plain = _speed(driver, ordinal, slab)
            driver.register_host(slab.address, size, ordinal)
            slab.region.before_release(partial(_unregister, driver, slab.address, ordinal, os.getpid()))
            return {"host": plain, "registered": _speed(driver, ordinal, slab)}
    except MemoryRoomError:
        return {}  # a full device, say: the choice is then made from capabilities alone, and its reason says so


def _speed(driver: Driver, ordinal: int, source: Slab) -> float:
    target = driver.alloc_device(source.size, ordinal)
    try:
        copy = target, source.address, source.size
        seconds = statistics.median(driver.copy_seconds(copy, ordinal) for _ in range(MEASURED_TIMES))
        return source.size / max(seconds, 1e-9)
    finally:
        driver.free(target, ordinal)
