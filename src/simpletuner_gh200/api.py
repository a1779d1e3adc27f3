"""The public Python names, where each lives, and the older places from which they can be imported.

Resolved on first use: the package itself imports neither torch nor SimpleTuner.
"""

from __future__ import annotations

import importlib
from typing import Any

PUBLIC_NAMES = {
    "gh200_uvm_enabled": "simpletuner_gh200.memory.hints",
    "set_uvm_hint_override": "simpletuner_gh200.memory.hints",
    "prefer_cpu_residency": "simpletuner_gh200.memory.hints",
    "prefer_gpu_residency": "simpletuner_gh200.memory.hints",
    "prefetch_to_device": "simpletuner_gh200.memory.hints",
    "optimize_batch_for_gh200": "simpletuner_gh200.memory.hints",
    "GH200InMemoryBackend": "simpletuner_gh200.seams.features.store.backend",
    "GH200GradientRamp": "simpletuner_gh200.ramp.schedule",
}

UVM_NAMES = tuple(name for name, module in PUBLIC_NAMES.items() if module.endswith(".hints"))


def resolve_name(name: str, asked_of: str) -> Any:
    """The object behind a public name; AttributeError, as a module would raise it, for any other."""
    if name not in PUBLIC_NAMES:
        raise AttributeError(f"module {asked_of!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC_NAMES[name]), name)
