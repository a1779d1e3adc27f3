"""Making slabs: kind, mapping, NUMA binding, registration, advice; undone in reverse if a step fails.

Which kind is a pure decision from capabilities, with its reason.

>>> maker = SlabMaker(current(), requested="auto")
>>> slab = maker.make(size, label="latents", shared=True)
>>> maker.records[-1]                                   # what was made, and why
"""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Literal

from simpletuner_gh200.errors import DriverError, FeatureUnavailable
from simpletuner_gh200.memory import advice, numa
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.memory.mapping import Region, map_file
from simpletuner_gh200.memory.slab import Slab, SlabKind

logger = logging.getLogger("simpletuner_gh200")

RequestedKind = Literal["auto", "registered", "managed", "host"]

KEPT_RECORDS = 256

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


def choose_kind(requested: RequestedKind, caps: Capabilities) -> SlabChoice:
    """What kind of slab to make. An explicit request is granted or refused (FeatureUnavailable); auto gets one."""
    if requested == "host":
        return SlabChoice("host", "requested")
    refusal = MANAGED if requested == "managed" else why_not_registered(caps)
    if refusal is None:
        return SlabChoice("registered", "the GPU copies from registered memory directly")
    if requested == "auto":
        return SlabChoice("host", refusal)
    raise FeatureUnavailable(
        f"cache_config.slab: {requested!r} is not possible here: {refusal}",
        remedy="set cache_config.slab to 'auto', which says what it chooses",
    )


class SlabMaker:
    """Makes the slabs of one rank, all of one kind choice. ``records`` are its latest, closed or not."""

    def __init__(
        self,
        driver: Driver,
        *,
        requested: RequestedKind = "auto",
        ordinal: int | None = None,
        near: int | None = None,
    ) -> None:
        """Raises FeatureUnavailable at once when the kind requested can't be had.

        ``near`` is the memory node to be on, by default the one beside the device.
        """
        self.driver = driver
        self.ordinal = ordinal = driver.home if ordinal is None else ordinal
        self.requested = requested
        self.caps = driver.capabilities(ordinal)
        self._near = self.caps.host_node if near is None else near
        self.choice = choose_kind(requested, self.caps)
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
            self.driver.register_host(slab.address, slab.size, self.ordinal)
        except DriverError as refused:
            if self.requested != "auto":
                raise
            logger.warning("gh200: slab %r stays plain host memory: %s", slab.label, str(refused))
            return SlabChoice("host", f"registering failed: {refused.message}")
        slab.region.before_release(partial(_unregister, self.driver, slab.address, self.ordinal, os.getpid()))
        return self.choice

    def _advise(self, slab: Slab) -> str:
        if slab.kind == "registered" and not self.caps.host_page_tables:
            return "pinned memory never moves: none needed"
        # The mapping is whole pages, whatever the slab's size: the last one is ours too.
        page = self.caps.page_size
        return advice.prefer(self.driver, self.caps, (slab.address, -(-slab.size // page) * page), "cpu").reason


def _unregister(driver: Driver, address: int, ordinal: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the registration is the parent's
        driver.unregister_host(address, ordinal)
