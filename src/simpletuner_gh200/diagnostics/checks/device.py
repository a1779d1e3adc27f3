"""GH2xx: the driver, what it says the devices can do, and how much of their memory is in use."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, CheckResult, check, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context, dotted
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.driver.nvml import NvmlDevice
from simpletuner_gh200.units import counted, format_bytes

OLDEST_CUDA = 12020
"""12.2: the first driver with locations by NUMA node in advice and prefetch."""
BUSY = 0.1
"""Share of the memory that others may hold before it is worth saying."""


@check("GH201", "NVIDIA driver and CUDA versions")
def driver_version(context: Context) -> CheckResult:
    """Unified memory needs a driver of CUDA 12.2 or newer, and torch one of its own CUDA's major version."""
    if not context.has_device:
        return _without_device(context)
    version = context.device.driver_version
    kernel = f"driver {context.kernel_driver or '(version unknown)'}, CUDA {dotted(version)}"
    if version < OLDEST_CUDA:
        return failed(f"{kernel}: older than CUDA {dotted(OLDEST_CUDA)}", "install NVIDIA driver R535 or newer")
    built = context.torch.cuda if context.torch else None
    if built and version // 1000 < int(built.split(".")[0]):
        return failed(
            f"{kernel}; torch is built for CUDA {built}", "install a newer driver, or torch for the older CUDA"
        )
    return passed(kernel)


def _without_device(context: Context) -> CheckResult:
    if not context.nvidia_gpus:
        return skipped(f"no NVIDIA GPU here ({context.no_device})")
    if context.kernel_driver is None:
        fix = "install the driver, or give the container access to it (docker run --gpus all)"
        return failed("an NVIDIA GPU is here, but no driver is loaded for it", fix)
    fix = "see the checks of torch and the bindings above; in a container: docker run --gpus all"
    return warned(f"driver {context.kernel_driver} is loaded, but: {context.no_device}", fix)


@check("GH217", "device memory as NVML sees it")
def nvml_memory(context: Context) -> CheckResult:
    """HBM budgets come from it: cudaMemGetInfo alone counts the page cache as used on coherent machines."""
    try:
        device = NvmlDevice(0, context.environment)
    except FeatureUnavailable as missing:
        if context.has_device or context.nvidia_gpus:
            return warned(missing.message, missing.remedy or "see GH201")
        return skipped(missing.message)
    try:
        memory = device.memory()
    finally:
        device.close()
    if memory is None:
        return passed("not supported by this device: it has one pool with the CPU, so budgets follow MemAvailable")
    shown = f"{format_bytes(memory.used)} of {format_bytes(memory.total)} in use"
    if memory.used > BUSY * memory.total:
        return warned(f"{shown} before training starts", "see who holds it: nvidia-smi; and GH303 for the page cache")
    return passed(shown)


def _capability(code: str, what: str, field: str, means: str, why: str) -> Check:
    """``means`` is what follows where a device says no."""

    def look(context: Context) -> CheckResult:
        first = context.device
        devices = [context.driver.capabilities(ordinal) for ordinal in range(context.driver.device_count())]
        without = [f"{device.ordinal} ({device.name})" for device in devices if not getattr(device, field)]
        if without:
            return warned(f"no, on device {', '.join(without)}", means)
        return passed(f"yes, on {counted(len(devices), 'device')} ({first.name})")

    return Check(code, f"capability: {what}", why, look)


PAGEABLE = _capability(
    "GH213",
    "GPU access to pageable memory",
    "pageable_access",
    "not a coherent machine: slabs are registered and copied, which works as well as PCIe allows",
    "With it the GPU reads plain host memory in place; that is what makes a coherent machine.",
)
PAGE_TABLES = _capability(
    "GH214",
    "the CPU's page tables are the GPU's",
    "host_page_tables",
    "placement hints on system memory stay off; slabs are registered instead",
    "Hardware translation (ATS); without it advice on plain host memory does nothing.",
)
REGISTERING = _capability(
    "GH216",
    "registering host memory",
    "host_register",
    "batches are copied through torch's own pinned buffers; slower, not wrong",
    "Registered slabs are copied to the device asynchronously, without a second pinned copy.",
)
