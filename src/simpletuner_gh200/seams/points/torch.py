"""torch: the ``pin_memory`` stand-in.

SimpleTuner pins batches unconditionally, and torch raises where it has no accelerator. There, and only there,
pinning returns the tensor itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import Patch, put
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam
from simpletuner_gh200.upstream.spec import seam

logger = logging.getLogger("simpletuner_gh200")


def has_accelerator(torch: ModuleType) -> bool:
    """Asks NVML rather than CUDA: initialising CUDA here would poison processes forked later."""
    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        if torch.cuda.is_available():
            return True
    finally:
        if before is None:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        else:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before
    return bool(torch.backends.mps.is_available())


def _pin_memory(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    if has_accelerator(module):
        return []
    logger.info("gh200: torch has no accelerator here: pin_memory returns the tensor as it is")

    def pin_memory(self: Any, device: Any = None) -> Any:
        return self

    return [put(module.Tensor, "pin_memory", pin_memory)]


PIN_MEMORY = seam(
    "torch.pin_memory", module="torch", place="Tensor.pin_memory", need="batches are pinned even without an accelerator"
)

SEAMS = (Seam(PIN_MEMORY.name, _pin_memory, own_spec=PIN_MEMORY),)
