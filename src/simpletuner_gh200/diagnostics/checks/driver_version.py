"""GH201: the NVIDIA driver, and whether it carries the CUDA that torch was built for."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context

OLDEST_CUDA = 12020
"""12.2: the first driver with locations by NUMA node in advice and prefetch."""


def _run(context: Context) -> Finding:
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


CHECK = Check(
    code="GH201",
    what="NVIDIA driver and CUDA versions",
    why="Unified memory needs a driver of CUDA 12.2 or newer, and torch one of its own CUDA's major version.",
    run=_run,
)
