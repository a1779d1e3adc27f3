"""Seam: the ``pin_memory`` stand-in.

SimpleTuner pins batches unconditionally, and torch raises where it has no accelerator. There, and only there,
pinning returns the tensor itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import AnyPatch, Patch
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam
from simpletuner_gh200.upstream.spec import SeamSpec

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


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    if has_accelerator(module):
        return []
    logger.info("gh200: torch has no accelerator here: pin_memory returns the tensor as it is")

    def pin_memory(self: Any, device: Any = None) -> Any:
        return self

    return [Patch(module.Tensor, "pin_memory", lambda _original: pin_memory)]


SEAM = Seam(
    "torch.pin_memory",
    _patches,
    own_spec=SeamSpec(
        name="torch.pin_memory",
        module="torch",
        qualname="Tensor.pin_memory",
        parameters=None,
        features=("core",),
        reason="SimpleTuner pins batches even where torch has no accelerator",
    ),
)
