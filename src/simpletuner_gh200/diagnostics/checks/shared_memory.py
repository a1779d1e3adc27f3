"""GH309: is /dev/shm large enough?"""

from __future__ import annotations

import os
import re

from simpletuner_gh200.diagnostics.check import Check, Finding, passed, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.units import GIB, KIB, MIB, format_bytes

ENOUGH = GIB
_FIX = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}


def _run(context: Context) -> Finding:
    size = _mounted_size(context)
    if size is None:
        return warned("/dev/shm is not mounted", _FIX)
    if size < ENOUGH:
        return warned(f"/dev/shm holds {format_bytes(size)}", _FIX)
    return passed(f"/dev/shm holds {format_bytes(size)}")


def _mounted_size(context: Context) -> int | None:
    """Bytes that /dev/shm may hold: its size option, or what the kernel says where it has none."""
    for line in (context.read("proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) > 3 and words[1] == "/dev/shm":
            found = re.search(r"\bsize=(\d+)([kmg]?)", words[3])
            if found:
                return int(found[1]) * _UNITS[found[2]]
            usage = os.statvfs(context.root / "dev/shm")
            return usage.f_blocks * usage.f_frsize
    return None


CHECK = Check(
    code="GH309",
    what="/dev/shm",
    why="NCCL and torch's workers meet there; Docker gives 64 MiB. Our own slabs are memfds: they don't need it, but "
    "the container's memory limit counts both.",
    run=_run,
)
