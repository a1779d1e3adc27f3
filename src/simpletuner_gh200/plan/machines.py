"""Machines a run can be planned for: capacities and rates as published (``machines.json``), and this machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.units import GIB

DATA = Path(__file__).with_name("machines.json")


@dataclass(frozen=True)
class Machine:
    """Of one rank: its device, and the CPU memory of its node. Bytes, bytes per second, operations per second."""

    name: str
    title: str
    hbm: int
    """Bytes of the device's own memory; 0 where there is no device, or none of its own."""
    grace: int
    """Bytes of CPU memory that a run may take."""
    flops: float
    hbm_rate: float
    h2d: float
    d2h: float
    in_place: float
    """Of a kernel that reads CPU memory over the link."""
    disk_rate: float = 3e9
    network: float = 25e9
    """To another node, one way."""
    from_files: float = 1 / 0.7e-3
    from_slabs: float = 1 / 0.06e-3
    """Samples per second of the data side: torch.load of a 512 KB latent, the same row of a slab."""
    peers: float = 150e9
    """To another GPU of the node, one way."""
    disk: int | None = None
    """Bytes free; None: not known."""
    context: int = 3 * GIB // 2
    """Bytes that the device holds before torch reserves any."""
    process: int = 6 * GIB
    """Bytes of CPU memory of a process that has not loaded a model."""
    has_device: bool = True
    devices: int = 1
    """On the node: their ranks share its CPU memory."""
    most_devices: int | None = None
    """That a node of this machine comes with; None: not known."""
    coherent: bool = True
    """Is the CPU's memory reached over a coherent link? Model state goes behind PCIe only where it is requested."""
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def rate_sources(self) -> dict[str, str]:
        """Of every rate where it comes from, and of the capacities that somebody stated."""
        return {**dict.fromkeys(RATES, "assumed"), **self.sources}

    @property
    def one_pool(self) -> bool:
        return self.hbm == 0

    def sharing(self, ranks: int) -> int:
        """How many of a run's ranks are on one node."""
        return max(min(ranks, self.devices), 1)

    def of_one_rank(self, ranks: int) -> Machine:
        """With its part of the CPU memory of a whole node."""
        return replace(self, grace=self.grace // self.sharing(ranks))

    def capacity(self, pool: str) -> int | None:
        return {"hbm": self.hbm, "grace": self.grace, "disk": self.disk}[pool]


RATES: Mapping[str, str] = {
    "flops": "operations/s",
    **dict.fromkeys(("hbm_rate", "h2d", "d2h", "in_place", "disk_rate", "network", "peers"), "bytes/s"),
    **dict.fromkeys(("from_files", "from_slabs"), "samples/s"),
}
"""Fields of a machine that somebody can measure, and their unit."""


def _machine(fields: Mapping[str, Any]) -> Machine:
    return Machine(**{**fields, "hbm": int(fields["hbm"]), "grace": int(fields["grace"])})


_DATA = json.loads(DATA.read_text(encoding="utf-8"))
MACHINES = {fields["name"]: _machine(fields) for fields in _DATA["published"]}
NAMES = (*MACHINES, "this")


def machine(name: str, *, output: str | None = None) -> Machine:
    """By name; ``output`` is the folder whose disk counts on this machine."""
    if name == "this":
        return this_machine(output=output)
    if name not in MACHINES:
        raise UsageError(f"--machine {name!r}: not known", remedy=f"one of {', '.join(NAMES)}")
    return MACHINES[name]


def this_machine(*, output: str | None = None, driver: Driver | None = None, root: Path = Path("/")) -> Machine:
    """What answers here: capacities are this machine's, rates those of the published machine most like it."""
    from simpletuner_gh200.memory.driver.detect import current

    driver = driver or current()
    found: dict[str, Any] = {"grace": host_memory(root).available, "disk": free_disk(output)}
    if driver.device_count() == 0:
        return _as_found(_machine(_DATA["without_gpu"]), found)
    caps = driver.capabilities(driver.home)
    if caps.integrated:
        return _as_found(MACHINES["gb10"], found, title=caps.name)
    larger = "gh200-144" if caps.device_total >= 120 * GIB else "gh200-96"
    near = MACHINES[larger if caps.mode in ("numa", "cdmm") else "h100"]
    return _as_found(near, {**found, "hbm": caps.device_total}, title=caps.name, devices=driver.device_count())


def _as_found(like: Machine, found: Mapping[str, Any], **more: Any) -> Machine:
    sources = {**like.sources, **dict.fromkeys(found, "measured: read here")}
    return replace(like, name="this", most_devices=None, **found, **more, sources=sources)


def free_disk(output: str | None) -> int | None:
    folder = Path(output or ".").absolute()
    existing = next((level for level in (folder, *folder.parents) if level.exists()), None)
    return shutil.disk_usage(existing).free if existing is not None and os.access(existing, os.R_OK) else None
