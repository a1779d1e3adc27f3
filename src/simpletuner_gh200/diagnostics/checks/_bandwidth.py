"""The checks of copy bandwidth: what they need before they may measure."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.bandwidth import SIZE, Direction, Measured, coherent_link, measure
from simpletuner_gh200.diagnostics.check import Finding, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.units import MIB, format_bytes

LEAST_FREE = 32 * MIB
"""Copies of less than a quarter of this say nothing about a link."""


def may_not_measure(context: Context) -> str | None:
    if not context.has_device:
        return context.no_device
    if not context.allocate:
        return "--skip-allocation"
    return f"only {format_bytes(_free(context))} of device memory are free" if _free(context) < LEAST_FREE else None


def _free(context: Context) -> int:
    return context.driver.memory_info(0)[0]


def _size(context: Context) -> int:
    return min(SIZE, _free(context) // 4)


def one_way(context: Context, direction: Direction, least: float, fix: str) -> Finding:
    """Measure on the node next to the device; ``least`` bytes per second count for a coherent link only."""
    reason = may_not_measure(context)
    if reason is not None:
        return skipped(reason)
    device = context.driver.capabilities(0)
    found = measure(context.driver, 0, direction, node=device.host_node, size=_size(context))
    if coherent_link(device) and found.rate < least:
        return warned(f"{found}; a healthy GH200 gives at least {least / 1e9:.0f} GB/s", fix)
    return passed(str(found))


def remote_measured(context: Context, direction: Direction) -> Measured | None:
    """On the CPU node that is not the device's own; None where there is none."""
    near = context.driver.capabilities(0).host_node
    far = [node.index for node in context.nodes if node.has_cpus and node.index != near]
    if near is None or not far:
        return None
    return measure(context.driver, 0, direction, node=far[-1], size=_size(context))
