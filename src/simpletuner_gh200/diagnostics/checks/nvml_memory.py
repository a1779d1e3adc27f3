"""GH217: does NVML tell how much device memory is in use?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.driver.nvml import Nvml
from simpletuner_gh200.units import format_bytes

BUSY = 0.1
"""Share of the memory that others may hold before it is worth saying."""


def _run(context: Context) -> Finding:
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


CHECK = Check(
    code="GH217",
    what="device memory as NVML sees it",
    why="HBM budgets come from it: cudaMemGetInfo alone counts the page cache as used on coherent machines.",
    run=_run,
)
