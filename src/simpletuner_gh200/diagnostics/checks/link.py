"""GH5xx: measured: what the link between host and device carries, and whether an allocation may exceed HBM."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.bandwidth import Direction, Measured, coherent_link, measure
from simpletuner_gh200.diagnostics.beyond_hbm import allocate_beyond
from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.allocate import measured_size
from simpletuner_gh200.memory.ceilings import managed_room, trial_fits, trial_size
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.units import MIB, format_bytes

LEAST_FREE = 32 * MIB
"""Copies of less than a quarter of this say nothing about a link."""
LEAST_TO_DEVICE = 250e9
"""Measured by others on GH200: 342 to 421 GB/s. 450 is the link's limit one way."""
LEAST_TO_HOST = 120e9
"""Measured by others on GH200: 295 GB/s on one-chip machines, 150 to 170 on four-chip nodes."""


def _may_not_measure(context: Context) -> str | None:
    if not context.has_device:
        return context.no_device
    if not context.allocate:
        return "--skip-allocation"
    return f"only {format_bytes(_free(context))} of device memory are free" if _free(context) < LEAST_FREE else None


def _free(context: Context) -> int:
    return context.driver.memory_info(0)[0]


def _size(context: Context) -> int:
    return min(measured_size(context.root), _free(context) // 4)


def _one_way(context: Context, direction: Direction, least: float, fix: str) -> Finding:
    """Measure on the node next to the device; ``least`` bytes per second count for a coherent link only."""
    reason = _may_not_measure(context)
    if reason is not None:
        return skipped(reason)
    device = context.driver.capabilities(0)
    found = measure(context.driver, 0, direction, node=device.host_node, size=_size(context))
    if coherent_link(device) and found.rate < least:
        return warned(f"{found}; a healthy GH200 gives at least {least / 1e9:.0f} GB/s", fix)
    return passed(str(found))


def _remote(context: Context, direction: Direction) -> Measured | None:
    """On the CPU node that is not the device's own; None where there is none, or memory can't be put there."""
    near = context.driver.capabilities(0).host_node
    far = [node.index for node in context.nodes if node.has_cpus and node.index != near]
    if near is None or not far:
        return None
    found = measure(context.driver, 0, direction, node=far[-1], size=_size(context))
    return found if found.node == far[-1] else None


def to_device(context: Context) -> Finding:
    return _one_way(
        context,
        "to device",
        LEAST_TO_DEVICE,
        "see nvidia-smi -q -d PERFORMANCE,CLOCK and whether the slab's node is the "
        "GPU's own (GH301); compare with NVIDIA's nvbandwidth",
    )


def to_host(context: Context) -> Finding:
    return _one_way(
        context,
        "to host",
        LEAST_TO_HOST,
        "slower than the other way is normal (150 GB/s on nodes with four GH200); "
        "below that compare with NVIDIA's nvbandwidth",
    )


def remote_node(context: Context) -> Finding:
    reason = _may_not_measure(context)
    if reason is not None:
        return skipped(reason)
    both = [_remote(context, "to device"), _remote(context, "to host")]
    shown = [str(found) for found in both if found is not None]
    return passed("; ".join(shown)) if shown else skipped("no second CPU memory node that memory could be put on")


def beyond_hbm(context: Context) -> Finding:
    if not context.has_device or not context.allocate:
        return skipped(context.no_device if context.allocate else "--skip-allocation")
    device = context.driver.capabilities(0)
    if not device.managed:
        return skipped("the device has no managed memory")
    size = trial_size(context.oversubscription_scale, device.device_total)
    room = managed_room(device, host_memory(context.root).available)
    if not trial_fits(size, room):
        return skipped(f"{format_bytes(size)} would not leave room on this machine ({format_bytes(room)} in all)")
    try:
        held = allocate_beyond(context.driver, 0, size)
    except DriverError as refused:
        return failed(f"{format_bytes(size)}: {refused.message}", "see GH211; try a smaller --oversubscription-scale")
    shown = f"{format_bytes(size)}, {context.oversubscription_scale:g} times HBM ({format_bytes(device.device_total)})"
    if not held.intact:
        return failed(
            f"{shown}: what was read back is not what was written", "this is a broken machine: test its memory"
        )
    return passed(f"{shown}: written and read back")


CHECKS = (
    Check(
        code="GH501",
        what="bandwidth from host to device",
        why="Every batch travels this way. 900 GB/s is the sum of both directions: 450 is the limit of one.",
        run=to_device,
    ),
    Check(
        code="GH502",
        what="bandwidth from device to host",
        why="Evictions and checkpoints travel this way, and it is not the other direction's speed.",
        run=to_host,
    ),
    Check(
        code="GH503",
        what="bandwidth of the remote memory node",
        why="133 GB/s was measured there by others, 2.8 times less than locally: slabs are bound to the GPU's own "
        "node.",
        run=remote_node,
    ),
    Check(
        code="GH504",
        what="allocation beyond HBM",
        why="Managed memory that spills to Grace instead of failing: what uvm_access_pattern balanced stands on.",
        run=beyond_hbm,
    ),
)
