"""Copy bandwidth between host and device, each direction and each memory node by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.memory.mapping import Region, map_anonymous
from simpletuner_gh200.memory.numa import bind_to
from simpletuner_gh200.units import MIB

Direction = Literal["to device", "to host"]

SIZE = 256 * MIB
REPEATS = 5


@dataclass(frozen=True)
class Measured:
    """Bytes per second of the best of several copies; ``node`` is where the host memory was, if it was bound."""

    direction: Direction
    rate: float
    node: int | None

    def __str__(self) -> str:
        where = f", host memory on node {self.node}" if self.node is not None else ""
        return f"{self.rate / 1e9:.1f} GB/s {self.direction}{where}"


def measure(
    driver: Driver, ordinal: int, direction: Direction, *, node: int | None = None, size: int = SIZE
) -> Measured:
    """Copy ``size`` bytes several times on a stream of our own; everything taken is given back."""
    host = map_anonymous(size)
    bound = node is not None and bind_to(host.address, size, [node]).bound
    host.array()[::4096] = 1  # a page that was never touched has no place yet
    registered = driver.capabilities(ordinal).host_register
    if registered:
        driver.register_host(host.address, size, ordinal)
    try:
        rate = _best_rate(driver, ordinal, direction, host)
    finally:
        if registered:
            driver.unregister_host(host.address, ordinal)
    return Measured(direction, rate, node if bound else None)


def _best_rate(driver: Driver, ordinal: int, direction: Direction, host: Region) -> float:
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
