"""Machines a run can be planned for: capacities and rates as published, and this machine as it answers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.units import GIB

GB = 10**9


@dataclass(frozen=True)
class Machine:
    """Of one rank: its device, and the CPU memory beside it. Bytes, bytes per second, operations per second."""

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
    disk_rate: float = 3 * GB
    network: float = 25 * GB
    """To another node, one way."""
    from_files: float = 1 / 0.7e-3
    from_slabs: float = 1 / 0.06e-3
    """Samples per second of the data side: torch.load of a 512 KB latent, the same row of a slab."""
    peers: float = 150 * GB
    """To another GPU of the node, one way."""
    disk: int | None = None
    """Bytes free; None: not known."""
    has_device: bool = True
    devices: int = 1
    """On the node: their ranks share its CPU memory."""
    coherent: bool = True
    """Is the CPU's memory reached over a coherent link? Model state goes behind PCIe only where it is asked for."""
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
    "hbm_rate": "bytes/s",
    "h2d": "bytes/s",
    "d2h": "bytes/s",
    "in_place": "bytes/s",
    "disk_rate": "bytes/s",
    "network": "bytes/s",
    "peers": "bytes/s",
    "from_files": "samples/s",
    "from_slabs": "samples/s",
}
"""Fields of a machine that somebody can measure, and their unit."""

_DATA_SIDE = "measured: `gh200 bench cache`, on another machine"

_GH200_SOURCES = {
    "hbm": "cited: NVIDIA",
    "grace": "cited: NVIDIA",
    "hbm_rate": "cited: 3.4-3.7 TB/s measured by others on 96 GB",
    "h2d": "cited: 342-380 GB/s by copy engine",
    "d2h": "cited: 295-298 GB/s by copy engine; 150-170 on a node with four",
    "in_place": "cited: 328-339 GB/s",
    "flops": "assumed: two fifths of the peak",
    "disk_rate": "assumed",
    "network": "cited: 200 Gbit/s a rank",
    "from_files": _DATA_SIDE,
    "from_slabs": _DATA_SIDE,
    "peers": "assumed: six NVLink 4 links to a neighbour, on a node with four",
}

_GH200 = Machine(
    "gh200-96",
    "GH200, 96 GB HBM3",
    hbm=96 * GB,
    grace=480 * GB,
    flops=400e12,
    hbm_rate=3500 * GB,
    h2d=375 * GB,
    d2h=295 * GB,
    in_place=330 * GB,
    sources=_GH200_SOURCES,
)

MACHINES = {
    machine.name: machine
    for machine in (
        _GH200,
        replace(
            _GH200,
            name="gh200-144",
            title="GH200, 144 GB HBM3e",
            hbm=144 * GB,
            hbm_rate=4300 * GB,
            sources={**_GH200_SOURCES, "hbm_rate": "assumed: as far below NVIDIA's 4.9 TB/s as on 96 GB"},
        ),
        Machine(
            "gb200",
            "GB200, one GPU and its half of Grace",
            hbm=186 * GB,
            grace=240 * GB,
            flops=900e12,
            hbm_rate=7000 * GB,
            h2d=375 * GB,
            d2h=295 * GB,
            in_place=330 * GB,
            network=50 * GB,
            peers=800 * GB,
            sources={
                **_GH200_SOURCES,
                **dict.fromkeys(("h2d", "d2h", "in_place"), "assumed: as GH200"),
                "hbm_rate": "assumed: below NVIDIA's 8 TB/s",
                "flops": "assumed: below two fifths of NVIDIA's 2.5 PFLOP/s",
                "network": "cited: 400 Gbit/s a rank",
                "peers": "assumed: below NVIDIA's 900 GB/s of NVLink 5, one way",
            },
        ),
        Machine(
            "gb10",
            "GB10 / DGX Spark: one pool",
            hbm=0,
            grace=128 * GB,
            flops=50e12,
            hbm_rate=250 * GB,
            h2d=250 * GB,
            d2h=250 * GB,
            in_place=250 * GB,
            sources={
                "grace": "cited: NVIDIA",
                **dict.fromkeys(("hbm_rate", "h2d", "d2h", "in_place"), "assumed: below NVIDIA's 273 GB/s"),
                "flops": "assumed",
                "from_files": _DATA_SIDE,
                "from_slabs": _DATA_SIDE,
            },
        ),
        Machine(
            "h100",
            "H100 SXM, 80 GB, behind PCIe 5",
            hbm=80 * GB,
            grace=256 * GB,
            flops=400e12,
            hbm_rate=3000 * GB,
            h2d=55 * GB,
            d2h=55 * GB,
            in_place=40 * GB,
            peers=400 * GB,
            coherent=False,
            sources={
                "hbm": "cited: NVIDIA",
                "grace": "assumed",
                **dict.fromkeys(("h2d", "d2h"), "cited: PCIe 5 x16"),
                "flops": "assumed: two fifths of the peak",
                "hbm_rate": "assumed: below NVIDIA's 3.35 TB/s",
                "peers": "assumed: below NVIDIA's 450 GB/s of NVLink 4, one way",
                "from_files": _DATA_SIDE,
                "from_slabs": _DATA_SIDE,
            },
        ),
    )
}
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
    host = host_memory(root)
    disk = _free_disk(output)
    if driver.device_count() == 0:
        like = replace(MACHINES["gb10"], flops=0.2e12, hbm_rate=15 * GB, h2d=10 * GB, d2h=10 * GB, in_place=10 * GB)
        return replace(
            like,
            name="this",
            title="this machine, without a GPU",
            grace=host.available,
            disk=disk,
            has_device=False,
            sources=dict.fromkeys(("grace", "disk"), "measured: asked here"),
        )
    caps = driver.capabilities(driver.home)
    if caps.integrated:
        like = MACHINES["gb10"]
        asked = {**like.sources, **dict.fromkeys(("grace", "disk"), "measured: asked here")}
        return replace(like, name="this", title=caps.name, grace=host.available, disk=disk, sources=asked)
    coherent = caps.mode in ("numa", "cdmm")
    near = MACHINES["gh200-96" if caps.device_total < 120 * GIB else "gh200-144"] if coherent else MACHINES["h100"]
    measured = dict.fromkeys(("hbm", "grace", "disk"), "measured: asked here")
    return replace(
        near,
        name="this",
        title=caps.name,
        hbm=caps.device_total,
        grace=host.available,
        devices=driver.device_count(),
        disk=disk,
        sources={**near.sources, **measured},
    )


def _free_disk(output: str | None) -> int | None:
    folder = Path(output or ".").absolute()
    existing = next((level for level in (folder, *folder.parents) if level.exists()), None)
    return shutil.disk_usage(existing).free if existing is not None and os.access(existing, os.R_OK) else None
