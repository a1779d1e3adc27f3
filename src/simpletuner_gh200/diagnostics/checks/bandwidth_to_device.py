"""GH501: copies from host memory to the device."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding
from simpletuner_gh200.diagnostics.checks._bandwidth import one_way
from simpletuner_gh200.diagnostics.context import Context

LEAST = 250e9
"""Measured by others on GH200: 342 to 421 GB/s. 450 is the link's limit one way."""


def _run(context: Context) -> Finding:
    return one_way(
        context,
        "to device",
        LEAST,
        "see nvidia-smi -q -d PERFORMANCE,CLOCK and whether the slab's node is the "
        "GPU's own (GH301); compare with NVIDIA's nvbandwidth",
    )


CHECK = Check(
    code="GH501",
    what="bandwidth from host to device",
    why="Every batch travels this way. 900 GB/s is the sum of both directions: 450 is the limit of one.",
    run=_run,
)
