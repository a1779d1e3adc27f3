"""How much host memory this process may still take: the machine's, and that of every cgroup it lives in.

Everything takes ``root``, the folder that stands for ``/``, so that tests and the doctor can show it another machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.memory.numa import read_nodes

ROOT = Path("/")

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63; no machine has an exbibyte."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes. ``limit`` names what bounds ``available``: the machine or a cgroup."""

    total: int
    free: int
    available: int
    limit: str


def read_meminfo(root: Path = ROOT) -> dict[str, int]:
    """``/proc/meminfo`` in bytes, by its own names."""
    found = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdigit():
            found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found


def host_memory(root: Path = ROOT) -> HostMemory:
    """What can be taken without swapping or being killed: the least of MemAvailable and every cgroup's room."""
    meminfo = read_meminfo(root)
    total, free = meminfo["MemTotal"], meminfo["MemFree"]
    available, limit = meminfo.get("MemAvailable", free), "MemAvailable"
    nodes = read_nodes(root / "sys/devices/system/node")
    beside_cpus = sum(node.free for node in nodes if node.has_cpus)
    if not all(node.has_cpus for node in nodes) and beside_cpus < available:
        # A GPU's memory that is a node of its own is in MemAvailable, and not ours to fill.
        available, limit = beside_cpus, "the memory nodes with CPUs"
    for name, room, size in cgroup_rooms(root):
        total = min(total, size)
        if room < available:
            available, limit = room, f"cgroup {name}"
    return HostMemory(total=total, free=free, available=max(available, 0), limit=limit)


def cgroup_rooms(root: Path = ROOT) -> Iterator[tuple[str, int, int]]:
    """(cgroup, bytes left, limit) of each limited memory cgroup this process is in, its ancestors included."""
    for hierarchy, path in _memberships(root):
        files = _V1_FILES if hierarchy else _V2_FILES
        base = root / "sys/fs/cgroup" / hierarchy
        # Inside a container the own cgroup may be mounted as the root of the tree: then the path is not found there.
        for level in _levels(path):
            folder = base / level
            limit = _number(folder / files[0])
            if limit is None or limit >= _UNLIMITED:
                continue
            used = _number(folder / files[1]) or 0
            yield level or "/", limit - used + _reclaimable(folder), limit


_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_V2_FILES = ("memory.max", "memory.current")


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """(folder of the hierarchy, own path in it) for the memory controller, v1 and v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number_text, controllers, path = line.split(":", 2)
        if controllers == "":
            yield "", path.strip("/")
        elif "memory" in controllers.split(","):
            yield "memory", path.strip("/")


def _levels(path: str) -> Iterator[str]:
    """``a/b`` -> ``a/b``, ``a``, and the root itself."""
    while path:
        yield path
        path = os.path.dirname(path)
    yield ""


def _reclaimable(folder: Path) -> int:
    """Clean page cache is charged to the cgroup but is given back when it is needed."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))


def last_level_cache(root: Path = ROOT) -> int:
    """Bytes of the largest cache of the first CPU; 0 where the kernel doesn't tell."""
    sizes = [0]
    for file in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        if text.rstrip("KMG").isdigit():
            sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
