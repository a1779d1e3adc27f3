"""GH504: an allocation beyond HBM."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.beyond_hbm import allocate_beyond
from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.units import format_bytes


def _run(context: Context) -> Finding:
    if not context.has_device or not context.allocate:
        return skipped(context.no_device if context.allocate else "--skip-allocation")
    device = context.driver.capabilities(0)
    if not device.managed:
        return skipped("the device has no managed memory")
    size = int(device.device_total * context.oversubscription_scale)
    room = host_memory(context.root).available + (0 if device.integrated else device.device_total)
    if size > 0.9 * room:
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


CHECK = Check(
    code="GH504",
    what="allocation beyond HBM",
    why="This is what use_uvm stands on: managed memory that spills to Grace instead of failing.",
    run=_run,
)
