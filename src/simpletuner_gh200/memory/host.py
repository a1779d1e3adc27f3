"""How much host memory this process may still take: the machine's, and that of every cgroup it lives in.

Everything takes ``root``, the folder that stands for ``/``, so that tests and the doctor can show it another machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
    for name, folder, older in _cgroups("memory", root):
        files = _V1_FILES if older else _V2_FILES
        limit = _number(folder / files[0])
        if limit is not None and limit < _UNLIMITED:
            used = _number(folder / files[1]) or 0
            yield name, limit - used + _reclaimable(folder), limit


def cpu_quotas(root: Path = ROOT) -> Iterator[float]:
    """Cores that each limited CPU cgroup of this process allows, its ancestors included."""
    for _name, folder, older in _cgroups("cpu", root):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if older else ("cpu.max",)
        words = " ".join(_text(folder / file) for file in files).split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            yield int(words[0]) / int(words[1])


_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_V2_FILES = ("memory.max", "memory.current")


def _cgroups(controller: str, root: Path) -> Iterator[tuple[str, Path, bool]]:
    """(name, folder, is it of v1?) of every cgroup with this controller that the process is in, ancestors included."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _number_text, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        # Inside a container the own cgroup may be mounted as the root of the tree: then the path is not found there.
        level = PurePosixPath(path.strip("/"))
        for name in dict.fromkeys((str(level), *map(str, level.parents))):
            yield "/" if name == "." else name, base / name, bool(controllers)


def _reclaimable(folder: Path) -> int:
    """Clean page cache is charged to the cgroup but is given back when it is needed."""
    stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))


def usable_cores(root: Path = ROOT) -> int:
    """CPUs that this process may run on, and may use in full by the quota of its cgroups."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *cpu_quotas(root)])))


def cpu_seconds(process: int) -> float:
    """That a process has used, its threads together."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """Empty where it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
