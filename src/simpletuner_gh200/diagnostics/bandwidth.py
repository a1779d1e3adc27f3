"""Copy bandwidth between host and device, each direction and each memory node by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from simpletuner_gh200.memory.allocate import SlabMaker, measured_size
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.memory.mapping import PAGE
from simpletuner_gh200.memory.numa import nodes_of_pages
from simpletuner_gh200.memory.slab import Slab

Direction = Literal["to device", "to host"]

REPEATS = 5


@dataclass(frozen=True)
class Measured:
    """Bytes per second of the best of several copies; ``node`` is where the kernel had the host memory, if it told."""

    direction: Direction
    rate: float
    node: int | None

    def __str__(self) -> str:
        where = f", host memory on node {self.node}" if self.node is not None else ""
        return f"{self.rate / 1e9:.1f} GB/s {self.direction}{where}"


def measure(
    driver: Driver, ordinal: int, direction: Direction, *, node: int | None = None, size: int | None = None
) -> Measured:
    """Copy several times on a stream of our own, between the device and a slab as training has it: shared, registered.

    ``node`` is the memory node to be on, by default the one beside the device; ``size`` goes beyond the CPU's caches.
    """
    size = size or measured_size()
    maker = SlabMaker(driver, ordinal=ordinal, measured={}, near=node)
    with maker.make(size, label="bandwidth", shared=True) as host:
        host.array[::PAGE] = 1  # a page that was never touched has no place yet
        places = nodes_of_pages(host.address, size, PAGE)
        rate = _best_rate(driver, ordinal, direction, host)
    return Measured(direction, rate, next(iter(places)) if len(places) == 1 else None)


def _best_rate(driver: Driver, ordinal: int, direction: Direction, host: Slab) -> float:
    device = driver.alloc_device(host.size, ordinal)
    try:
        stream = driver.create_stream(ordinal)
        try:
            ends = (device, host.address) if direction == "to device" else (host.address, device)
            return host.size / min(_seconds(driver, ordinal, stream, (*ends, host.size)) for _ in range(REPEATS))
        finally:
            driver.destroy_stream(stream, ordinal)
    finally:
        driver.free(device, ordinal)


def _seconds(driver: Driver, ordinal: int, stream: int, copy: tuple[int, int, int]) -> float:
    started = time.perf_counter()
    driver.copy([copy], stream, ordinal)
    driver.synchronize_stream(stream, ordinal)
    return time.perf_counter() - started


def coherent_link(device: Capabilities) -> bool:
    """Is host memory reached over a coherent chip-to-chip link? By capabilities, never by name."""
    return device.pageable_access and device.host_page_tables and not device.integrated
