"""Where telemetry's numbers come from: the turns of the training loop, and what host and device tell of themselves.

No seam gives the two moments of the loop that the clock needs: it turns, and a micro-batch is through. Both are wrapped
on the objects of this run only. Upstream looks for a stop signal at the top of every turn, right before it fetches a
batch, and runs each micro-batch inside ``accelerator.accumulate``.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.driver.nvml import NvmlDevice
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.seams.patch import Patches, wrap_method
from simpletuner_gh200.telemetry.measure import Source, StepClock

logger = logging.getLogger("simpletuner_gh200")


class LoopWatch:
    """Tells the clock of each turn of one trainer's loop."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._patches = Patches()

    def watch(self, trainer: Any) -> None:
        self._patches.install(
            wrap_method(trainer, "_exit_on_signal", self._top_of_loop),
            wrap_method(trainer.accelerator, "accumulate", self._micro_batch),
        )
        self._clock.batch_requested()

    def leave(self) -> None:
        self._patches.remove()

    def _top_of_loop(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        self._clock.batch_requested()
        return result

    @contextmanager
    def _timed(self, block: AbstractContextManager[None]) -> Iterator[None]:
        with block:
            yield
        self._clock.batch_done()

    def _micro_batch(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        return self._timed(wrapped(*args, **kwargs))


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
