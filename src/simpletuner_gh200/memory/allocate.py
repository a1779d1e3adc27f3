"""Making slabs: kind, mapping, NUMA binding, registration, advice; undone in reverse if a step fails.

Which kind is a pure decision from capabilities, with its reason.

>>> maker = SlabMaker(current(), requested="auto")
>>> maker.choice                                        # its kind, and why
>>> slab = maker.make(size, label="latents", shared=True)
"""

from __future__ import annotations

import logging
import os
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


MANAGED = (
    "managed slabs are not offered: the CPU also touches cached data, and pages that both sides touch in turn move "
    "back and forth at a tenth of the link's rate"
)


@dataclass(frozen=True)
class SlabChoice:
    kind: SlabKind
    reason: str


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
    """Makes the slabs of one rank, all of one kind."""

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
        logger.info("gh200: slabs are %s memory: %s", self.choice.kind, self.choice.reason)

    def make(self, size: int, *, label: str, shared: bool = False) -> Slab:
        """A slab of exactly ``size`` bytes. ``shared`` puts it behind a memfd for other ranks."""
        slab = Slab.shared(size, label=label) if shared else Slab.anonymous(size, label=label)
        self._bind(slab.region)
        return self._register(slab)

    def prepare(self, fd: int, size: int) -> None:
        """Have the pages of an empty memfd taken from the right memory, whoever writes them; it is ``size`` large then.

        The policy belongs to the memory, not to this mapping of it.
        """
        os.ftruncate(fd, size)
        self._bind(map_file(fd, size))

    def attach(self, fd: int, size: int, *, label: str) -> Slab:
        """Map what a rank of the node has made, and register this mapping."""
        return self._register(Slab.attach(fd, size, label=label))

    def _bind(self, region: Region) -> None:
        numa.bind(region.address, region.size, near=self._near, device_node=self.caps.device_node)

    def _register(self, slab: Slab) -> Slab:
        """Let the device know of it, for as long as its memory lives."""
        if self.choice.kind == "registered":
            try:
                self.driver.register_host(slab.address, slab.size, self.ordinal)
                slab.kind = "registered"
                slab.region.before_release(partial(_unregister, self.driver, slab.address, self.ordinal, os.getpid()))
            except DriverError as refused:
                if self.requested != "auto":
                    raise
                logger.warning("gh200: slab %r stays plain host memory: %s", slab.label, str(refused))
        if slab.kind == "host" or self.caps.host_page_tables:  # else it is pinned, and never moves
            # The mapping is whole pages, whatever the slab's size: the last one is ours too.
            page = self.caps.page_size
            advice.prefer(self.driver, self.caps, (slab.address, -(-slab.size // page) * page), "cpu")
        return slab


def _unregister(driver: Driver, address: int, ordinal: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the registration is the parent's
        driver.unregister_host(address, ordinal)
