"""An allocation larger than HBM, written in full and read back: does managed memory hold what it promises?"""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.mapping import map_anonymous
from simpletuner_gh200.units import MIB

BLOCK = 8 * MIB
PROBE = 4096


@dataclass(frozen=True)
class Held:
    """``size`` bytes were allocated and written on the device's stream; ``intact`` if every probe came back."""

    size: int
    intact: bool


def allocate_beyond(driver: Driver, ordinal: int, size: int) -> Held:
    """Allocate managed memory, write a pattern through the device, read a piece of every block back; free it."""
    address = driver.alloc_managed(size, ordinal)
    try:
        stream = driver.create_stream(ordinal)
        try:
            return Held(size, _fill_and_read(driver, ordinal, stream, address, size))
        finally:
            driver.destroy_stream(stream, ordinal)
    finally:
        driver.free(address, ordinal)


def _fill_and_read(driver: Driver, ordinal: int, stream: int, address: int, size: int) -> bool:
    block, back = map_anonymous(BLOCK), map_anonymous(PROBE)
    pattern, seen = block.array(), back.array()
    offsets = range(0, size, BLOCK)
    for number, offset in enumerate(offsets):
        pattern[:PROBE] = number % 251
        driver.copy([(address + offset, block.address, min(BLOCK, size - offset))], stream, ordinal)
        driver.synchronize_stream(stream, ordinal)
    for number, offset in enumerate(offsets):
        length = min(PROBE, size - offset)
        driver.copy([(back.address, address + offset, length)], stream, ordinal)
        driver.synchronize_stream(stream, ordinal)
        if not (seen[:length] == number % 251).all():
            return False
    return True
