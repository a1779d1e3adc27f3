"""GH302: is HBM a NUMA node of its own, or kept by the driver (CDMM)?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context

_PARAMETERS = "proc/driver/nvidia/params"


def _run(context: Context) -> Finding:
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


CHECK = Check(
    code="GH302",
    what="how HBM appears to the kernel",
    why="As a NUMA node HBM can be filled by ordinary programs and by cached files; under CDMM it can't, and prefetch "
    "of plain memory to the GPU silently stays on the CPU.",
    run=_run,
)
