"""A slab's bytes as a CUDA tensor, zero-copy, where the device can reach them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.dlpack import tensor_at
from simpletuner_gh200.memory.driver.interface import Capabilities
from simpletuner_gh200.memory.slab import Slab

if TYPE_CHECKING:
    import torch


def reachable(slab: Slab, caps: Capabilities) -> str | None:
    """Why the device can't read the slab in place; None where it can."""
    if caps.mode == "none":
        return f"there is no CUDA device: {caps.name}"
    if slab.kind == "host" and not caps.pageable_access:
        return "the slab is plain host memory and the device can't reach that"
    if slab.kind == "registered" and not (caps.pageable_access or caps.registered_in_place):
        return "the device sees registered memory at another address than the host"
    return None


def cuda_view(slab: Slab, offset: int, shape: Sequence[int], dtype: torch.dtype, caps: Capabilities) -> torch.Tensor:
    """The same bytes as ``slab.tensor``, as a tensor on the device: kernels read them over the link, nothing moves.

    The caller orders CPU writes before GPU reads, as with any memory both sides see.
    """
    refusal = reachable(slab, caps)
    if refusal is not None:
        raise FeatureUnavailable(
            f"no CUDA view of slab '{slab.label}': {refusal}", remedy="stage it with DeviceStager instead"
        )
    if offset % dtype.itemsize:
        raise ValueError(f"offset {offset} is not a multiple of the {dtype.itemsize} bytes of {dtype}")
    slab.bytes_at(offset, math.prod(shape) * dtype.itemsize)
    return tensor_at(slab.region, slab.address + offset, shape, dtype, "cuda", caps.ordinal)
