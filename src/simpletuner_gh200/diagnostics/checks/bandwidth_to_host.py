"""GH502: copies from the device to host memory."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding
from simpletuner_gh200.diagnostics.checks._bandwidth import one_way
from simpletuner_gh200.diagnostics.context import Context

LEAST = 120e9
"""Measured by others on GH200: 295 GB/s on one-chip machines, 150 to 170 on four-chip nodes."""


def _run(context: Context) -> Finding:
    return one_way(
        context,
        "to host",
        LEAST,
        "slower than the other way is normal (150 GB/s on nodes with four GH200); "
        "below that compare with NVIDIA's nvbandwidth",
    )


CHECK = Check(
    code="GH502",
    what="bandwidth from device to host",
    why="Evictions and checkpoints travel this way, and it is not the other direction's speed.",
    run=_run,
)
