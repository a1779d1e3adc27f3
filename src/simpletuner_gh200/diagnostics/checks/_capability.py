"""The checks of single device capabilities: each asks the driver one question, of every device."""

from __future__ import annotations

from collections.abc import Callable

from simpletuner_gh200.diagnostics.check import Check, Finding, Status, passed, skipped
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.driver.interface import Capabilities


def capability_check(
    *, code: str, what: str, why: str, has: Callable[[Capabilities], bool], lacking: Status, means: str
) -> Check:
    """``lacking`` is the status where a device says no, and ``means`` what follows from that."""

    def run(context: Context) -> Finding:
        if not context.has_device:
            return skipped(context.no_device)
        devices = [context.driver.capabilities(ordinal) for ordinal in range(context.driver.device_count())]
        without = [f"{device.ordinal} ({device.name})" for device in devices if not has(device)]
        if without:
            return Finding(lacking, f"no, on device {', '.join(without)}", means)
        return passed(f"yes, on {len(devices)} device{'s' if len(devices) > 1 else ''} ({devices[0].name})")

    return Check(code, what, why, run)
