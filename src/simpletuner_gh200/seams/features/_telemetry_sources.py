"""Where telemetry's slow numbers come from on this machine: host memory, our slabs, the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.telemetry.sampler import Source

if TYPE_CHECKING:
    from simpletuner_gh200.seams.runtime import Runtime


def sources(runtime: Runtime) -> dict[str, Source]:
    found: dict[str, Source] = {"host": _host}
    return found


def _host() -> Mapping[str, Any]:
    memory = host_memory()
    resident = _resident()
    return {
        "available": memory.available,
        "total": memory.total,
        "resident": resident.get("VmRSS", 0),
        "slabs": resident.get("RssShmem", 0),
    }


def _resident() -> dict[str, int]:
    """Bytes that this process has in memory; RssShmem is what it has mapped of memfds, which are our slabs."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        lines = (line.split() for line in file if line.startswith(("VmRSS", "RssShmem")))
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
