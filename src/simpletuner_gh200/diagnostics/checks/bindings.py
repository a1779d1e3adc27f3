"""GH103: are NVIDIA's Python packages here that the GPU parts stand on?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed
from simpletuner_gh200.diagnostics.context import Context

_NEEDED = {"cuda": "cuda-bindings", "pynvml": "nvidia-ml-py"}


def _run(context: Context) -> Finding:
    missing = [package for module, package in _NEEDED.items() if context.package(module) is None]
    if not missing:
        return passed("cuda-bindings and nvidia-ml-py are installed")
    if not context.nvidia_gpus:
        return passed(f"not installed, and not needed without an NVIDIA GPU: {', '.join(missing)}")
    return failed(f"not installed: {', '.join(missing)}", "pip install 'simpletuner-gh200[cuda]'")


CHECK = Check(
    code="GH103",
    what="NVIDIA's Python bindings",
    why="Unified memory and GPU telemetry call the driver through them; stock torch has no such calls.",
    run=_run,
)
