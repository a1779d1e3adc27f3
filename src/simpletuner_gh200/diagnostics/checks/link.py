"""GH5xx: measured: what the link between host and device carries, and whether an allocation may exceed HBM."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from simpletuner_gh200.diagnostics.check import CheckResult, check, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context, NothingToLookAt
from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.ceilings import trial_room
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.mapping import PAGE, map_anonymous
from simpletuner_gh200.memory.numa import nodes_of_pages
from simpletuner_gh200.units import MIB, format_bytes

Direction = Literal["to device", "to host"]
DIRECTIONS: tuple[Direction, ...] = ("to device", "to host")

BLOCK = 8 * MIB
PROBE = 4096
MEASURED = 256 * MIB
"""More than a Grace CPU's own cache could answer for."""
LEAST_FREE = 32 * MIB
"""Copies of less than a quarter of this say nothing about a link."""
LEAST_TO_DEVICE = 250e9
"""Measured by others on GH200: 342 to 421 GB/s. 450 is the link's limit one way."""
LEAST_TO_HOST = 120e9
"""Measured by others on GH200: 295 GB/s on one-chip machines, 150 to 170 on four-chip nodes."""


@dataclass(frozen=True)
class CopyRate:
    """Bytes per second, the best of several copies; ``node`` is where the kernel had the host memory, if it says."""

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
    size = size or MEASURED
    maker = SlabMaker(driver, ordinal=ordinal, near=node)
    with maker.make(size, label="bandwidth", shared=True) as host:
        host.array[::PAGE] = 1  # a page that was never touched has no place yet
        places = nodes_of_pages(host.address, size, PAGE)
        rates = dict(zip(DIRECTIONS, driver.copy_rates(host.address, size, ordinal), strict=True))
    return CopyRate(direction, rates[direction], next(iter(places)) if len(places) == 1 else None)


def _rate(context: Context, direction: Direction, node: int | None) -> CopyRate:
    """With host memory on ``node``."""
    _ = context.device_to_allocate_on
    free, _total = context.driver.memory_info(0)
    if free < LEAST_FREE:
        raise NothingToLookAt(f"only {format_bytes(free)} of device memory are free")
    return measure(context.driver, 0, direction, node=node, size=min(MEASURED, free // 4))


def _one_way(context: Context, direction: Direction, least: float, fix: str) -> CheckResult:
    """Measure on the node next to the device; ``least`` bytes per second count for a coherent link only."""
    found = _rate(context, direction, context.device.host_node)
    device = context.device  # a coherent link is known by capabilities, never by name
    coherent = device.pageable_access and device.host_page_tables and not device.integrated
    if coherent and found.rate < least:
        return warned(f"{found}; a healthy GH200 gives at least {least / 1e9:.0f} GB/s", fix)
    return passed(str(found))


@check("GH501", "bandwidth from host to device")
def to_device(context: Context) -> CheckResult:
    """Every batch travels this way. 900 GB/s is the sum of both directions: 450 is the limit of one."""
    fix = (
        "see nvidia-smi -q -d PERFORMANCE,CLOCK and whether the slab's node is the GPU's own (GH301); nvbandwidth, too"
    )
    return _one_way(context, "to device", LEAST_TO_DEVICE, fix)


@check("GH502", "bandwidth from device to host")
def to_host(context: Context) -> CheckResult:
    """Evictions and checkpoints travel this way, and it is not the other direction's speed."""
    fix = "slower than the other way is normal (150 GB/s on nodes with four GH200); below that see NVIDIA's nvbandwidth"
    return _one_way(context, "to host", LEAST_TO_HOST, fix)


@check("GH503", "bandwidth of the remote memory node")
def remote_node(context: Context) -> CheckResult:
    """133 GB/s was measured there by others, 2.8 times less than locally: slabs are bound to the GPU's own node."""
    near = context.device_to_allocate_on.host_node
    far = [node.index for node in context.nodes if node.has_cpus and node.index != near]
    rates = [_rate(context, way, far[-1]) for way in DIRECTIONS] if near is not None and far else []
    shown = [str(rate) for rate in rates if rate.node == far[-1]]
    return passed("; ".join(shown)) if shown else skipped("no second CPU memory node that memory could be put on")


@check("GH504", "allocation beyond HBM")
def beyond_hbm(context: Context) -> CheckResult:
    """Managed memory that spills to Grace instead of failing: a driver that does it right is in order."""
    device = context.device_to_allocate_on
    if not device.managed:
        return skipped("the device has no managed memory")
    size = int(context.oversubscription_scale * device.device_total)
    room = trial_room(device, host_memory(context.root).available)
    if size > room:
        return skipped(f"{format_bytes(size)} would not leave room on this machine ({format_bytes(room)} may be taken)")
    try:
        intact = written_and_read_back(context.driver, 0, size)
    except DriverError as refused:
        return failed(f"{format_bytes(size)}: {refused.message}", "try a smaller --oversubscription-scale")
    shown = f"{format_bytes(size)}, {context.oversubscription_scale:g} times HBM ({format_bytes(device.device_total)})"
    if not intact:
        wrong = f"{shown}: what was read back is not what was written"
        return failed(wrong, "this is a broken machine: test its memory")
    return passed(f"{shown}: written and read back")


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
