"""What needs memory of the device: bandwidth of the link, each way and each node by itself, and managed memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from simpletuner_gh200.memory.allocate import SlabMaker, measured_size
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.memory.mapping import PAGE, map_anonymous
from simpletuner_gh200.memory.numa import nodes_of_pages
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import MIB

Direction = Literal["to device", "to host"]

REPEATS = 5

BLOCK = 8 * MIB
PROBE = 4096


@dataclass(frozen=True)
class CopyRate:
    """Bytes per second of the best of several copies; ``node`` is where the kernel had the host memory, if it says."""

    direction: Direction
    rate: float
    node: int | None

    def __str__(self) -> str:
        where = f", host memory on node {self.node}" if self.node is not None else ""
        return f"{self.rate / 1e9:.1f} GB/s {self.direction}{where}"


def measure(
    driver: Driver, ordinal: int, direction: Direction, *, node: int | None = None, size: int | None = None
) -> CopyRate:
    """Copy several times between the device and a slab as training has it: shared, registered.

    ``node`` is the memory node to be on, by default the one next to the device; ``size`` goes beyond the CPU's caches.
    """
    size = size or measured_size()
    maker = SlabMaker(driver, ordinal=ordinal, measured={}, near=node)
    with maker.make(size, label="bandwidth", shared=True) as host:
        host.array[::PAGE] = 1  # a page that was never touched has no place yet
        places = nodes_of_pages(host.address, size, PAGE)
        rate = _best_rate(driver, ordinal, direction, host)
    return CopyRate(direction, rate, next(iter(places)) if len(places) == 1 else None)


def _best_rate(driver: Driver, ordinal: int, direction: Direction, host: Slab) -> float:
    device = driver.alloc_device(host.size, ordinal)
    try:
        ends = (device, host.address) if direction == "to device" else (host.address, device)
        best = min(driver.copy_seconds((*ends, host.size), ordinal) for _ in range(REPEATS))
    finally:
        driver.free(device, ordinal)
    return host.size / max(best, 1e-9)


def written_and_read_back(driver: Driver, ordinal: int, size: int) -> bool:
    """Allocate managed memory, write a pattern through the device, read a piece of every block back: is it the same?"""
    block, back = map_anonymous(BLOCK), map_anonymous(PROBE)
    pattern, seen = block.array(), back.array()
    with ExitStack() as undo:
        address = driver.alloc_managed(size, ordinal)
        undo.callback(driver.free, address, ordinal)
        for number, offset in enumerate(range(0, size, BLOCK)):
            pattern[:PROBE] = number % 251
            driver.copy_seconds((address + offset, block.address, min(BLOCK, size - offset)), ordinal)
        for number, offset in enumerate(range(0, size, BLOCK)):
            length = min(PROBE, size - offset)
            driver.copy_seconds((back.address, address + offset, length), ordinal)
            if not (seen[:length] == number % 251).all():
                return False
    return True


def coherent_link(device: Capabilities) -> bool:
    """Is host memory reached over a coherent chip-to-chip link? By capabilities, never by name."""
    return device.pageable_access and device.host_page_tables and not device.integrated
