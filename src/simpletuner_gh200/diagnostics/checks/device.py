"""GH2xx: the driver, what it says the devices can do, and how much of their memory is in use."""

from __future__ import annotations

from collections.abc import Callable

from simpletuner_gh200.diagnostics.check import Check, Finding, FindingStatus, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.driver.interface import Capabilities
from simpletuner_gh200.memory.driver.nvml import Nvml
from simpletuner_gh200.units import format_bytes

OLDEST_CUDA = 12020
"""12.2: the first driver with locations by NUMA node in advice and prefetch."""
BUSY = 0.1
"""Share of the memory that others may hold before it is worth saying."""


def driver_version(context: Context) -> Finding:
    if not context.has_device:
        return _without_device(context)
    version = context.driver.capabilities(0).driver_version
    kernel = f"driver {context.kernel_driver or '(version unknown)'}, CUDA {_dotted(version)}"
    if version < OLDEST_CUDA:
        return failed(f"{kernel}: older than CUDA {_dotted(OLDEST_CUDA)}", "install NVIDIA driver R535 or newer")
    built = context.torch.cuda if context.torch else None
    if built and version // 1000 < int(built.split(".")[0]):
        return failed(
            f"{kernel}; torch is built for CUDA {built}", "install a newer driver, or torch for the older CUDA"
        )
    return passed(kernel)


def _without_device(context: Context) -> Finding:
    if not context.nvidia_gpus:
        return skipped(f"no NVIDIA GPU here ({context.no_device})")
    if context.kernel_driver is None:
        return failed(
            "an NVIDIA GPU is here, but no driver is loaded for it",
            "install the driver, or give the container access to it (docker run --gpus all)",
        )
    return warned(
        f"driver {context.kernel_driver} is loaded, but: {context.no_device}",
        "see the checks of torch and the bindings above; in a container: docker run --gpus all",
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _capability(
    *, code: str, what: str, why: str, has: Callable[[Capabilities], bool], lacking: FindingStatus, means: str
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


def nvml_memory(context: Context) -> Finding:
    try:
        nvml = Nvml()
    except FeatureUnavailable as missing:
        found = warned if context.has_device or context.nvidia_gpus else None
        return found(missing.message, missing.remedy or "see GH201") if found else skipped(missing.message)
    try:
        memory = nvml.device(0, context.environment).memory()
    finally:
        nvml.close()
    if memory is None:
        return passed("not supported by this device: it has one pool with the CPU, so budgets follow MemAvailable")
    shown = f"{format_bytes(memory.used)} of {format_bytes(memory.total)} in use"
    if memory.used > BUSY * memory.total:
        return warned(f"{shown} before training starts", "see who holds it: nvidia-smi; and GH303 for the page cache")
    return passed(shown)


CHECKS = (
    Check(
        code="GH201",
        what="NVIDIA driver and CUDA versions",
        why="Unified memory needs a driver of CUDA 12.2 or newer, and torch one of its own CUDA's major version.",
        run=driver_version,
    ),
    _capability(
        code="GH211",
        what="capability: managed memory",
        why="Managed slabs, and uvm_access_pattern balanced, allocate managed memory.",
        has=lambda device: device.managed,
        lacking="fail",
        means="leave use_uvm and slab: managed out of the configuration",
    ),
    _capability(
        code="GH212",
        what="capability: concurrent managed access",
        why="Without it CPU and GPU may not touch managed memory at the same time.",
        has=lambda device: device.concurrent_managed,
        lacking="warn",
        means="leave slab: managed out of the configuration; auto does",
    ),
    _capability(
        code="GH213",
        what="capability: GPU access to pageable memory",
        why="With it the GPU reads plain host memory in place; that is what makes a coherent machine.",
        has=lambda device: device.pageable_access,
        lacking="warn",
        means="not a coherent machine: slabs are registered and copied, which works as well as PCIe allows",
    ),
    _capability(
        code="GH214",
        what="capability: the CPU's page tables are the GPU's",
        why="Hardware translation (ATS); without it advice on plain host memory does nothing.",
        has=lambda device: device.host_page_tables,
        lacking="warn",
        means="placement hints on system memory stay off; slabs are registered instead",
    ),
    _capability(
        code="GH215",
        what="capability: direct host access to managed memory",
        why="With it the CPU reads managed memory in HBM without moving it.",
        has=lambda device: device.direct_managed_from_host,
        lacking="warn",
        means="managed memory moves when the CPU touches it: keep data that both touch out of it (slab: auto does)",
    ),
    _capability(
        code="GH216",
        what="capability: registering host memory",
        why="Registered slabs are copied to the device asynchronously, without a second pinned copy.",
        has=lambda device: device.host_register,
        lacking="warn",
        means="batches are copied through torch's own pinned buffers; slower, not wrong",
    ),
    Check(
        code="GH217",
        what="device memory as NVML sees it",
        why="HBM budgets come from it: cudaMemGetInfo alone counts the page cache as used on coherent machines.",
        run=nvml_memory,
    ),
)
