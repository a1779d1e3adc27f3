"""What autograd saves: which of it must stay on the device, how it lies in its storage, what a node may hold of it.

Weights, buffers, inputs and the copies of weights that autocast makes never leave. A storage is known by its own
object, never by an address that might be another's by now: a weak reference is held for as long as the identity is
used, and while it is held the object's place is not given to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, strided
from torch.multiprocessing.reductions import StorageWeakRef

Layout = tuple[torch.dtype, Sequence[int], Sequence[int]]
"""Of a tensor: type, shape, strides."""

LOW = frozenset({torch.bfloat16, torch.float16})

VIEWS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "AsStridedBackward0"})
"""Between a weight's copy and the place that saves it."""

PLAIN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""Bytes that are the whole truth; a complex tensor may be a conjugate that was never computed."""

_OWN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Kinds that have a storage of their own; subclasses may be made of several, or of none."""


def identities(tensors: Iterable[torch.Tensor]) -> dict[int, StorageWeakRef]:
    """Storage -> the weak reference that keeps its identity its own."""
    found: dict[int, StorageWeakRef] = {}
    for tensor in tensors:
        if type(tensor) in _OWN and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, StorageWeakRef(storage))
    return found


def let_go(references: Iterable[int]) -> None:
    """Free weak references that ``storage._weak_ref()`` gave, as StorageWeakRef does one at a time."""
    free = torch.UntypedStorage._free_weak_ref
    for reference in references:
        free(reference)


class Weights:
    """Parameters and buffers of a model, as they are now."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._listed = [tensor for tensor in tensors if type(tensor) in _OWN and tensor.layout is torch.strided]
        self.storages = identities(self._listed)
        full = [tensor for tensor in self._listed if tensor.dtype is torch.float32]
        self.shapes = {frozenset(tensor.shape) for tensor in full}
        self._counts = {tensor.numel() for tensor in full}

    def refresh(self) -> None:
        """Some optimizers give a weight another storage when they step; its identity follows."""
        storages = self.storages
        for tensor in self._listed:
            if tensor.untyped_storage()._cdata not in storages:
                self.storages = identities(self._listed)
                return

    def copied_by_autocast(self, tensor: torch.Tensor) -> bool:
        """Is this low-precision tensor the copy of a weight? A trained one's history says so, a frozen one's shape.

        Whether autocast is on can't be asked here: it is off inside the operators that it casts for.
        """
        if tensor.numel() not in self._counts:
            return False  # at once for nearly all, without a look at their history
        node: Any = tensor.grad_fn
        if node is None:
            return not tensor.requires_grad and frozenset(tensor.shape) in self.shapes
        while node is not None and node.name() in VIEWS:
            node = node.next_functions[0][0]
        if node is None or node.name() != "ToCopyBackward0":
            return False
        source = node.next_functions[0][0]
        return source is not None and source.name() == "torch::autograd::AccumulateGrad"


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


def may_move(tensor: torch.Tensor, minimum: int) -> bool:
    """Is it large enough, and are its bytes its numbers? Asked in the order in which most are done with."""
    try:
        size = tensor.nbytes
    except RuntimeError:  # a sparse one has no bytes of its own
        return False
    if size < minimum or type(tensor) is not Tensor or tensor.dtype not in PLAIN:
        return False
    return tensor.layout is strided and not tensor.is_nested and not tensor.is_neg()


def extent(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[Any, int, int]:
    """(identity, first byte, bytes) of what is copied for it: the storage, or a part of it with an identity of its own.

    A part where the view needs less than half, from an aligned beginning."""
    length = storage.nbytes()
    if length > WHOLE * tensor.nbytes:
        item = tensor.element_size()
        first = tensor.storage_offset() * item
        reach = item * (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))
        start = first // ALIGNED * ALIGNED
        part = min(first + reach, length) - start
        if WHOLE * part <= length:
            return (storage._cdata, start, part), start, part
    return storage._cdata, 0, length


def changed(dtype: torch.dtype, shape: Sequence[int], expected: int, found: int) -> RuntimeError:
    """As torch says it, with the operator whose gradient needs the tensor."""
    node = torch._C._current_autograd_node()
    operator = node.name() if node is not None else "an operator"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}], saved for {operator}, is at version {found}; expected version {expected} instead"
    )
