"""What was examined, as fields for whoever audits: when, where, which hardware and which versions.

A GPU is told by its name, its PCI device id and its place on the bus: no serial number and no UUID is asked for.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from typing import Any

import simpletuner_gh200
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.host import host_memory, read_meminfo

PACKAGES = ("simpletuner", "torch", "accelerate", "diffusers", "transformers", "cuda-bindings", "nvidia-ml-py", "lz4")


def describe(context: Context) -> dict[str, Any]:
    """JSON-ready. None where the machine does not say; bytes are bytes."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": context.read("proc/sys/kernel/hostname") or platform.node(),
        "architecture": context.machine,
        "kernel": context.read("proc/sys/kernel/osrelease") or platform.release(),
        "page_bytes": context.page_size,
        "cores": context.cores,
        "driver": context.kernel_driver,
        "cuda": _cuda(context),
        "gpus": _gpus(context),
        "memory": _memory(context),
        "versions": _versions(context.search_path),
    }


def _memory(context: Context) -> dict[str, Any] | None:
    try:
        installed, usable = read_meminfo(context.root)["MemTotal"], host_memory(context.root)
    except (OSError, KeyError):
        return None  # the checks say why
    return {
        "total_bytes": installed,
        "usable_bytes": usable.total,
        "available_bytes": usable.available,
        "nodes": [{"node": node.index, "cpus": node.has_cpus, "free_bytes": node.free} for node in context.nodes],
    }


def _cuda(context: Context) -> str | None:
    if not context.has_device:
        return None
    version = context.driver.capabilities(0).driver_version
    return f"{version // 1000}.{version % 1000 // 10}"


def _gpus(context: Context) -> list[dict[str, Any]]:
    """The driver's devices; what only the PCI bus knows of, where no driver answers."""
    places: list[str | None] = list(context.nvidia_gpus)
    if not context.has_device:
        return [{"name": None, "memory_bytes": None, **_on_the_bus(context, place)} for place in places]
    devices = [context.driver.capabilities(ordinal) for ordinal in range(context.driver.device_count())]
    # Device numbers follow the bus only where every device is visible.
    known = places if len(places) == len(devices) else [None] * len(devices)
    return [
        {"name": device.name, "memory_bytes": device.device_total, **_on_the_bus(context, place)}
        for device, place in zip(devices, known, strict=True)
    ]


def _on_the_bus(context: Context, place: str | None) -> dict[str, str | None]:
    device = context.read(f"sys/bus/pci/devices/{place}/device") if place else None
    return {"pci_address": place, "pci_device": device}


def _versions(search_path: Sequence[str] | None) -> dict[str, str | None]:
    where = list(search_path) if search_path is not None else sys.path
    found = {"python": platform.python_version(), "simpletuner-gh200": simpletuner_gh200.__version__}
    return {**found, **{name: _version(name, where) for name in PACKAGES}}


def _version(name: str, where: list[str]) -> str | None:
    return next((item.version for item in distributions(name=name, path=where)), None)
