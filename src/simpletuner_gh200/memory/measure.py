"""How fast the device copies from each kind of host memory, so that ``auto`` needn't guess."""

from __future__ import annotations

import os
import statistics
import time
from functools import partial

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.mapping import map_anonymous
from simpletuner_gh200.memory.slab import SlabKind
from simpletuner_gh200.units import MIB

SIZE = 32 * MIB
REPEATS = 5


def copy_speeds(driver: Driver, ordinal: int, *, size: int = SIZE) -> dict[SlabKind, float]:
    """Bytes per second from plain and from registered memory; empty where there is nothing to compare or measure."""
    caps = driver.capabilities(ordinal)
    if caps.mode == "none" or not caps.pageable_access or not caps.host_register:
        return {}
    try:
        return {kind: _speed(driver, ordinal, kind, size) for kind in ("host", "registered")}
    except MemoryRoomError:
        return {}  # a full device, say: the choice is then made from capabilities alone, and its reason says so


def _speed(driver: Driver, ordinal: int, kind: SlabKind, size: int) -> float:
    source = map_anonymous(size)
    source.array()[:: os.sysconf("SC_PAGESIZE")] = 1  # a page that was never touched has no place yet
    if kind == "registered":
        driver.register_host(source.address, size, ordinal)
        source.before_release(partial(driver.unregister_host, source.address, ordinal))
    target = driver.alloc_device(size, ordinal)
    try:
        return size / statistics.median(_seconds(driver, ordinal, target, source.address, size) for _ in range(REPEATS))
    finally:
        driver.free(target, ordinal)


def _seconds(driver: Driver, ordinal: int, target: int, source: int, size: int) -> float:
    stream = driver.create_stream(ordinal)
    try:
        started = time.perf_counter()
        driver.copy([(target, source, size)], stream, ordinal)
        driver.synchronize_stream(stream, ordinal)
        return max(time.perf_counter() - started, 1e-9)
    finally:
        driver.destroy_stream(stream, ordinal)
