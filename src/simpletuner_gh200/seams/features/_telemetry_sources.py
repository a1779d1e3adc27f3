"""Where telemetry's slow numbers come from on this machine: host memory, our slabs, the device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.telemetry.sampler import Source

if TYPE_CHECKING:
    from simpletuner_gh200.seams.runtime import Runtime

_PAGE = os.sysconf("SC_PAGESIZE")


def sources(runtime: Runtime) -> dict[str, Source]:
    found: dict[str, Source] = {"host": _host}
    return found


def _host() -> Mapping[str, Any]:
    memory = host_memory()
    return {"available": memory.available, "total": memory.total, "resident": _resident(), "slabs": _slabs()}


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE


def _slabs() -> int:
    """Bytes of shared memory (memfd) that this process has resident: our slabs, for the most part."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[2]) * _PAGE
