"""Placement hints as the guides name them. Every result is truthy only when advice was applied and confirmed.

>>> result = prefer_cpu_residency(latents)
>>> bool(result), result.reason
(False, "it is ordinary device memory of PyTorch's caching allocator: ...")
"""

from __future__ import annotations

from simpletuner_gh200.memory.batch_hints import BatchReport, optimize_batch_for_gh200
from simpletuner_gh200.memory.hint_switch import gh200_uvm_enabled, set_uvm_hint_override
from simpletuner_gh200.memory.residency import (
    HintResult,
    prefer_cpu_residency,
    prefer_gpu_residency,
    prefetch_to_device,
    refusals,
)

__all__ = [
    "BatchReport",
    "HintResult",
    "gh200_uvm_enabled",
    "optimize_batch_for_gh200",
    "prefer_cpu_residency",
    "prefer_gpu_residency",
    "prefetch_to_device",
    "refusals",
    "set_uvm_hint_override",
]
