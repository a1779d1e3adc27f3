"""GH303: has the page cache eaten HBM?"""

from __future__ import annotations

import re

from simpletuner_gh200.diagnostics.check import Check, Finding, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.units import format_bytes

MUCH = 0.05
"""Share of the node above which it is worth saying."""


def _run(context: Context) -> Finding:
    device_nodes = [node.index for node in context.nodes if not node.has_cpus]
    if not device_nodes:
        return skipped("no memory node without CPUs: HBM is not visible to the page cache")
    eaten = {index: _cached(context, index) for index in device_nodes}
    worst = {index: used for index, (used, total) in eaten.items() if total and used / total > MUCH}
    if not worst:
        return passed("no cached files in HBM worth mentioning")
    shown = ", ".join(f"node {index}: {format_bytes(used)}" for index, used in worst.items())
    return warned(
        f"cached files sit in HBM ({shown})",
        "echo 1 > /proc/sys/vm/drop_caches as root, and start programs "
        "that read much with numactl --membind on the CPU nodes",
    )


def _cached(context: Context, index: int) -> tuple[int, int]:
    """(bytes of cached files, bytes of the node)"""
    text = context.read(f"sys/devices/system/node/node{index}/meminfo") or ""
    values = {name: int(kib) * 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    return values.get("FilePages", 0) - values.get("Shmem", 0), values.get("MemTotal", 0)


CHECK = Check(
    code="GH303",
    what="page cache in HBM",
    why="Where HBM is a NUMA node, files that were read once can fill it, and training finds less than it counts on.",
    run=_run,
)
