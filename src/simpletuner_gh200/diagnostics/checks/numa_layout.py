"""GH301: which memory nodes there are, and whether the device's memory is one of them."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.numa import Node
from simpletuner_gh200.units import format_bytes


def _run(context: Context) -> Finding:
    nodes = context.nodes
    if not nodes:
        return skipped("the kernel shows no NUMA nodes")
    balancing = context.read("proc/sys/kernel/numa_balancing")
    with_cpus = [node for node in nodes if node.has_cpus]
    shown = "; ".join(_shown(node) for node in nodes)
    if not with_cpus:
        return failed(f"no node has CPUs: {shown}", "give the container the host's /sys, or check its cpuset")
    if balancing not in (None, "0") and len(nodes) > 1:
        fix = "sysctl -w kernel.numa_balancing=0 (NVIDIA's advice for Grace)"
        return warned(f"{shown}; automatic NUMA balancing is on, which unmaps pages to see who uses them", fix)
    return passed(shown)


def _shown(node: Node) -> str:
    kind = "CPU memory" if node.has_cpus else "no CPUs (device memory)"
    return f"node {node.index}: {kind}, {format_bytes(node.free)} free"


CHECK = Check(
    code="GH301",
    what="NUMA layout",
    why="Slabs belong on the CPU node next to the GPU; the other socket is 2.8 times slower to reach.",
    run=_run,
)
