"""GH301 to GH306: the machine's memory: its nodes, its pages, and how much of it a run may take."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import CheckResult, check, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.host import cgroup_rooms, host_memory, read_meminfo
from simpletuner_gh200.memory.numa import Node
from simpletuner_gh200.units import GIB, KIB, format_bytes

_PARAMETERS = "proc/driver/nvidia/params"
MUCH_CACHED = 0.05
"""Share of the node above which it is worth saying."""
LITTLE_MEMORY = 2 * GIB
"""Below this not even the demo's caches and torch fit together."""
LITTLE_SHARE = 0.25
AS_GOOD_AS_ALL = 0.9
"""A limit above this share of the machine is as good as none."""


@check("GH301", "NUMA layout")
def numa_layout(context: Context) -> CheckResult:
    """Slabs belong on the CPU node next to the GPU; the other socket is 2.8 times slower to reach."""
    nodes = context.nodes
    if not nodes:
        return skipped("the kernel shows no NUMA nodes")
    balancing = context.read("proc/sys/kernel/numa_balancing")
    with_cpus = [node for node in nodes if node.has_cpus]
    shown = "; ".join(_node(node) for node in nodes)
    if not with_cpus:
        return failed(f"no node has CPUs: {shown}", "give the container the host's /sys, or check its cpuset")
    if balancing not in (None, "0") and len(nodes) > 1:
        fix = "sysctl -w kernel.numa_balancing=0 (NVIDIA's advice for Grace)"
        return warned(f"{shown}; automatic NUMA balancing is on, which unmaps pages to see who uses them", fix)
    return passed(shown)


def _node(node: Node) -> str:
    kind = "CPU memory" if node.has_cpus else "no CPUs (device memory)"
    return f"node {node.index}: {kind}, {format_bytes(node.free)} free"


@check("GH302", "how HBM appears to the kernel")
def hbm_mode(context: Context) -> CheckResult:
    """As a NUMA node HBM can be filled by ordinary programs and by cached files; under CDMM it can't, and
    prefetch of plain memory to the GPU silently stays on the CPU.
    """
    if not context.nvidia_gpus and not context.has_device:
        return skipped("no NVIDIA GPU here")
    without_cpus = [node.index for node in context.nodes if not node.has_cpus and node.free > 0]
    if without_cpus:
        listed = ", ".join(str(index) for index in without_cpus)
        return warned(
            f"HBM is NUMA node {listed}: malloc and the page cache can land in it",
            "keep other programs off it (numactl --membind of the CPU nodes), or load the driver with "
            "NVreg_CoherentGPUMemoryMode=driver (R580 or newer); our own slabs avoid that node by themselves",
        )
    if _cdmm(context):
        return passed(
            "HBM is kept by the driver (CDMM): nothing but CUDA lands in it; a prefetch of plain host memory "
            "to the GPU goes to the nearest CPU node instead, so slabs are copied, not migrated"
        )
    return passed("HBM is not a NUMA node here")


def _cdmm(context: Context) -> bool:
    if context.has_device and context.driver.capabilities(0).mode == "cdmm":
        return True
    lines = (context.read(_PARAMETERS) or "").splitlines()
    return any(line.startswith("CoherentGPUMemoryMode") and "driver" in line for line in lines)


@check("GH303", "page cache in HBM")
def hbm_page_cache(context: Context) -> CheckResult:
    """Where HBM is a NUMA node, files that were read once can fill it, and training finds less than it counts
    on.
    """
    device_nodes = [node for node in context.nodes if not node.has_cpus]
    if not device_nodes:
        return skipped("no memory node without CPUs: HBM is not visible to the page cache")
    worst = [node for node in device_nodes if node.cached > MUCH_CACHED * node.total]
    if not worst:
        return passed("no cached files in HBM worth mentioning")
    shown = ", ".join(f"node {node.index}: {format_bytes(node.cached)}" for node in worst)
    return warned(
        f"cached files sit in HBM ({shown})",
        "echo 1 > /proc/sys/vm/drop_caches as root, and start programs "
        "that read much with numactl --membind on the CPU nodes",
    )


@check("GH304", "page size")
def page_size(context: Context) -> CheckResult:
    """It decides whether the GPU's access counters can move pages by themselves, and what first touches cost."""
    size = context.page_size
    shown = f"{format_bytes(size)} pages"
    if context.machine not in {"aarch64", "arm64"}:
        return passed(f"{shown}, as usual on {context.machine}")
    if size >= 64 * KIB:
        return passed(f"{shown}, as NVIDIA recommends for Grace")
    return warned(
        f"{shown}: with these the driver's access counters never migrate anything, and page tables are 16 times larger",
        "install the distribution's 64k kernel (linux-image-nvidia-64k-hwe-*); until then rely on explicit prefetch, "
        "as the extension does, not on automatic migration",
    )


@check("GH305", "host memory that is available")
def available_memory(context: Context) -> CheckResult:
    """Datasets and caches are held in it. MemFree is not the measure: the page cache makes way; the cgroup
    doesn't.
    """
    memory = host_memory(context.root)
    shown = (
        f"{format_bytes(memory.available)} can be taken of {format_bytes(memory.total)} (bounded by {memory.limit}); "
        f"MemFree is {format_bytes(memory.free)}, the rest is page cache that makes way"
    )
    if memory.available < LITTLE_MEMORY:
        return failed(shown, "end other programs, or raise the container's memory limit (docker run --memory)")
    if memory.available < LITTLE_SHARE * memory.total:
        return warned(shown, "see what holds the rest: ps aux --sort=-rss | head, and ls -l /dev/shm")
    return passed(shown)


@check("GH306", "memory limit of the container")
def container_memory(context: Context) -> CheckResult:
    """Beyond it the kernel kills the run, however much the machine still has."""
    total = read_meminfo(context.root)["MemTotal"]
    rooms = [(limit, name, room) for name, room, limit in cgroup_rooms(context.root)]
    if not rooms or min(rooms)[0] >= AS_GOOD_AS_ALL * total:
        return passed("no memory limit below the machine's own")
    limit, name, room = min(rooms)
    return warned(
        f"cgroup {name} allows {format_bytes(limit)} of the machine's {format_bytes(total)}, {format_bytes(room)} left",
        "start the container with more (docker run --memory, Slurm --mem=0, Kubernetes limits.memory); shared memory "
        "and cached files count against it",
    )
