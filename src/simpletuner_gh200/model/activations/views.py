"""How a saved tensor lies in its storage, and what a node of the graph may hold of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

WHOLE = 2
"""A storage is copied whole unless it is so many times larger than the view."""
ALIGNED = 512
"""A part of a storage begins at a multiple of this, so that its views are aligned as they were."""


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes and version counter without the history: a node must not hold its own output."""
    return tensor if tensor.is_leaf else tensor.detach()


def as_it_is(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """It stays where it is, and its version with it; tensors of inference mode have none."""
    try:
        version = tensor._version
    except RuntimeError:
        return apart(tensor), None
    return tensor if tensor.is_leaf else tensor.detach(), version


def part_of(tensor: torch.Tensor, length: int) -> tuple[int, int]:
    """(first byte, bytes) of the storage that the view lies in, from an aligned beginning; all, where that is most."""
    item = tensor.element_size()
    first = tensor.storage_offset() * item
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) * item + item
    start = first // ALIGNED * ALIGNED
    part = min(first + reach, length) - start
    return (start, part) if WHOLE * part <= length else (0, length)


def view_of(there: torch.Tensor, layout: Any, offset: int) -> torch.Tensor:
    """A saved view, made again over the bytes that came back."""
    dtype, shape, stride = layout
    if dtype is there.dtype:
        return torch.as_strided(there, shape, stride, offset)
    return torch.empty(0, dtype=dtype, device=there.device).set_(there.untyped_storage(), offset, shape, stride)


def changed(dtype: torch.dtype, shape: Iterable[int], expected: int, found: int) -> RuntimeError:
    """As torch says it, with the operator whose gradient needs the tensor."""
    node = torch._C._current_autograd_node()
    operator = node.name() if node is not None else "an operator"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}], saved for {operator}, is at version {found}; expected version {expected} instead"
    )
