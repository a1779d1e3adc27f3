"""Making slabs: kind, mapping, NUMA binding, registration, advice; undone in reverse if a step fails.

Which kind is a pure decision from capabilities and measurements, with its reason.

>>> maker = SlabMaker(current(), requested="auto")
>>> slab = maker.make(size, label="latents", shared=True)
>>> maker.records[-1]                                   # what was made, and why
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from simpletuner_gh200.errors import DriverError, FeatureUnavailable, MemoryRoomError
from simpletuner_gh200.memory import advice, numa
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.memory.host import ROOT, last_level_cache
from simpletuner_gh200.memory.mapping import PAGE, Region, map_file
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.memory.slab import Slab, SlabKind
from simpletuner_gh200.units import MIB, format_bytes

logger = logging.getLogger("simpletuner_gh200")

RequestedKind = Literal["auto", "registered", "managed", "host"]

WORTH_SWITCHING = 1.10
"""Plain memory must beat registered memory by this much before auto prefers it."""

KEPT_RECORDS = 256
LEAST_MEASURED = 256 * MIB

MANAGED = (
    "managed slabs are not offered: the CPU also touches cached data, and pages that both sides touch in turn move "
    "back and forth at a tenth of the link's rate"
)


@dataclass(frozen=True)
class SlabChoice:
    kind: SlabKind
    reason: str


@dataclass(frozen=True)
class SlabRecord:
    """One slab as it was made: for doctor, summary and the curious. Torch's own statistics don't show slabs."""

    label: str
    size: int
    kind: SlabKind
    reason: str
    binding: str
    advice: str


def why_not_registered(caps: Capabilities) -> str | None:
    """None where this device can register host memory."""
    if caps.mode == "none":
        return f"there is no CUDA device: {caps.absence}"
    return None if caps.host_register else "the device can't register host memory"


def choose_kind(
    requested: RequestedKind, caps: Capabilities, *, measured: Mapping[SlabKind, float] | None = None
) -> SlabChoice:
    """What kind of slab to make. An explicit request is granted or refused (FeatureUnavailable); auto gets one.

    ``measured`` maps kinds to copy bandwidth towards the device, bytes per second, where somebody measured.
    """
    refusal = why_not_registered(caps)
    if requested == "host":
        return SlabChoice("host", "requested")
    if requested != "auto":
        refusal = MANAGED if requested == "managed" else refusal
        if refusal is None:
            return SlabChoice("registered", "requested")
        raise FeatureUnavailable(
            f"cache_config.slab: {requested!r} is not possible here: {refusal}",
            remedy="set cache_config.slab to 'auto', which says what it chooses",
        )
    if refusal is not None:
        return SlabChoice("host", refusal)
    pinned, plain = ((measured or {}).get(kind, 0.0) for kind in ("registered", "host"))
    if pinned and plain and caps.pageable_access:
        speeds = f"registered {format_bytes(pinned)}/s, plain {format_bytes(plain)}/s measured"
        if plain > WORTH_SWITCHING * pinned:
            return SlabChoice("host", f"plain memory is faster here: {speeds}")
        return SlabChoice("registered", speeds)
    return SlabChoice("registered", "the GPU copies from registered memory directly")


class SlabMaker:
    """Makes the slabs of one rank, all of one kind choice. ``records`` are its latest, closed or not."""

    def __init__(
        self,
        driver: Driver,
        *,
        requested: RequestedKind = "auto",
        ordinal: int | None = None,
        measured: Mapping[SlabKind, float] | None = None,
        near: int | None = None,
    ) -> None:
        """Raises FeatureUnavailable at once when the kind requested can't be had.

        ``measured`` is what ``copy_speeds`` found; by default ``auto`` measures by itself where kinds can be compared.
        ``near`` is the memory node to be on, by default the one beside the device.
        """
        self.driver = driver
        self.ordinal = ordinal = driver.home if ordinal is None else ordinal
        self.requested = requested
        self.caps = driver.capabilities(ordinal)
        self._near = self.caps.host_node if near is None else near
        if measured is None and requested == "auto":
            measured = copy_speeds(driver, ordinal)
        self.choice = choose_kind(requested, self.caps, measured=measured)
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
        record = SlabRecord(slab.label, slab.size, choice.kind, choice.reason, bound, self._advise(slab))
        self.records.append(record)
        return slab

    def _bind(self, region: Region) -> str:
        return numa.bind(region.address, region.size, near=self._near, device_node=self.caps.device_node)

    def _register(self, slab: Slab) -> SlabChoice:
        if self.choice.kind != "registered":
            return self.choice
        try:
            register(self.driver, slab, self.ordinal)
        except DriverError as refused:
            if self.requested != "auto":
                raise
            logger.warning("gh200: slab %r stays plain host memory: %s", slab.label, str(refused))
            return SlabChoice("host", f"registering failed: {refused.message}")
        return self.choice

    def _advise(self, slab: Slab) -> str:
        if slab.kind == "registered" and not self.caps.host_page_tables:
            return "pinned memory never moves: none needed"
        # The mapping is whole pages, whatever the slab's size: the last one is ours too.
        page = self.caps.page_size
        return advice.prefer(self.driver, self.caps, (slab.address, -(-slab.size // page) * page), "cpu").reason


def register(driver: Driver, slab: Slab, ordinal: int) -> None:
    """Let the device know of a slab, for as long as its memory lives."""
    driver.register_host(slab.address, slab.size, ordinal)
    slab.region.before_release(partial(_unregister, driver, slab.address, ordinal, os.getpid()))


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
    reported: dict[SlabKind, float] = group.receive("copy speeds")[0]["speeds"]
    return reported


def copy_speeds(driver: Driver, ordinal: int, *, size: int | None = None) -> dict[SlabKind, float]:
    """Bytes per second from plain and from registered memory; empty where there is nothing to compare or measure.

    From what training copies from: shared memory, on the node that slabs are bound to, the same pages both times.
    """
    caps = driver.capabilities(ordinal)
    if caps.mode == "none" or not caps.pageable_access or not caps.host_register:
        return {}
    size = size or measured_size()
    try:
        maker = SlabMaker(driver, requested="host", ordinal=ordinal)
        with maker.make(size, label="measured", shared=True) as slab:
            slab.array[::PAGE] = 1  # a page that was never touched has no place yet
            plain, _ = driver.copy_rates(slab.address, size, ordinal)
            register(driver, slab, ordinal)
            return {"host": plain, "registered": driver.copy_rates(slab.address, size, ordinal)[0]}
    except MemoryRoomError:
        return {}  # a full device, say: the choice is then made from capabilities alone, and its reason says so
