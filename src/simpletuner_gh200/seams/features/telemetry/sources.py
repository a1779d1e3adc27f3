"""Where telemetry's numbers come from, as far as they are the machine's: what host and device tell of themselves."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.driver.nvml import NvmlDevice
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.telemetry.measure import Source

logger = logging.getLogger("simpletuner_gh200")


def sources(trainer: Any) -> dict[str, Source]:
    """What this machine can tell; without a GPU there is no device to ask."""
    found: dict[str, Source] = {"host": _host}
    device = _device(trainer)
    return found if device is None else {**found, "device": device}


def _device(trainer: Any) -> Source | None:
    place = trainer.accelerator.device
    if place.type != "cuda":
        return None
    try:
        device = NvmlDevice(place.index or 0, os.environ)
    except FeatureUnavailable as missing:
        logger.info("gh200: no device numbers in telemetry: %s", missing.message)
        return None
    from torch.cuda import memory_reserved

    return partial(_device_numbers, device, partial(memory_reserved, place))


def _device_numbers(device: NvmlDevice, of_torch: Callable[[], int]) -> Mapping[str, Any]:
    """Only what the device has an answer to; ``reserved`` is what of it torch's allocator took."""
    numbers: dict[str, Any] = {}
    memory = device.memory()
    if memory is not None:
        numbers.update(total=memory.total, used=memory.used, free=memory.free, reserved=of_torch())
    traffic = device.link_traffic()
    if traffic is not None:
        numbers.update(link_in_per_second=traffic[0], link_out_per_second=traffic[1])
    return numbers


def _host() -> Mapping[str, Any]:
    memory = host_memory()
    resident = _resident()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "available": memory.available,
        "total": memory.total,
        "resident": resident.get("VmRSS", 0),
        "shared": resident.get("RssShmem", 0),
        "minor_faults": usage.ru_minflt,
        "major_faults": usage.ru_majflt,
    }


def _resident() -> dict[str, int]:
    """Bytes that this process has in memory; RssShmem is what it has mapped of memfds: slabs that ranks share."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        lines = (line.split() for line in file if line.startswith(("VmRSS", "RssShmem")))
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
