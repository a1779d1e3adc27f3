"""Batches assembled straight from published bytes: one copy per sample, into a buffer that is used again, or straight
to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from simpletuner_gh200.cache.buffers import BufferPool
from simpletuner_gh200.cache.copying import address_of, copy_rows
from simpletuner_gh200.cache.layout import Leaf
from simpletuner_gh200.cache.record import contiguous_strides, tensor_maker
from simpletuner_gh200.cache.table import Found
from simpletuner_gh200.memory.copier import SlabRange

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.memory.copier import Copier


def same_tensor(leaves: Sequence[Leaf | None]) -> Leaf | None:
    """The first leaf, if all are there and alike but for their place in the payload, and can be stacked here."""
    first = leaves[0]
    if first is None or first.grad or not first.count:
        return None
    if all(leaf is first for leaf in leaves):  # of one layout, as most batches are
        return first
    alike = (first.dtype, first.shape, first.strides, False)
    same = all(leaf is not None and (leaf.dtype, leaf.shape, leaf.strides, leaf.grad) == alike for leaf in leaves)
    return first if same else None


@lru_cache(maxsize=4096)
def stack_strides(shape: tuple[int, ...], strides: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
    """The strides that ``torch.stack`` gives to so many such tensors; latents often come channels-last."""
    import torch

    if strides is None:
        return contiguous_strides((count, *shape))
    return tuple(torch.stack([torch.empty_strided(shape, strides)] * count).stride())


def rows_of(flat: torch.Tensor, leaf: Leaf, count: int) -> torch.Tensor:
    """So many payloads, one after the other in ``flat``, as ``torch.stack`` of the tensors would give them."""
    import torch

    shape = (count, *leaf.shape)
    rows = torch.as_strided(flat, shape, (leaf.count, *(leaf.strides or contiguous_strides(leaf.shape))))
    wanted = stack_strides(leaf.shape, leaf.strides, count)
    if tuple(rows.stride()) == wanted:
        return rows
    return torch.empty_strided(shape, wanted, dtype=rows.dtype, device=rows.device).copy_(rows)


def assemble(entries: Sequence[Found], leaves: Sequence[Leaf], pool: BufferPool) -> torch.Tensor:
    """What ``torch.stack`` of those tensors would give. The leaves must be alike: see ``same_tensor``."""
    import torch

    leaf, count = leaves[0], len(entries)
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    size = leaf.count * dtype.itemsize
    buffer = pool.get(size * count)
    wanted = stack_strides(leaf.shape, leaf.strides, count)
    batch = torch.as_strided(torch.from_numpy(buffer).view(dtype), (count, *leaf.shape), wanted)
    if leaf.strides is None or wanted[1:] == leaf.strides:
        # By address: slicing arrays would cost as much as copying a small latent.
        start = address_of(buffer)
        copy_rows(start, [one.address + place.offset for one, place in zip(entries, leaves, strict=True)], size)
    else:
        for row, entry, place in zip(batch, entries, leaves, strict=True):
            row.copy_(tensor_maker(entry.payload)(place))
    return batch


def stacked(tensors: Sequence[torch.Tensor], pool: BufferPool, *, joined: bool) -> torch.Tensor | None:
    """``torch.stack``, or with ``joined`` ``torch.cat`` along the first dimension, into a pooled buffer.

    None where the tensors aren't contiguous CPU tensors alike in shape and dtype: then torch does it.
    """
    import torch

    first = tensors[0]
    plain = all(
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype == first.dtype
        and tensor.shape == first.shape
        and tensor.is_contiguous()
        and not tensor.requires_grad
        for tensor in tensors
    )
    if not plain or not first.numel() or (joined and first.dim() == 0):
        return None
    size = first.numel() * first.itemsize
    buffer = pool.get(size * len(tensors))
    copy_rows(address_of(buffer), [tensor.data_ptr() for tensor in tensors], size)
    rows = torch.from_numpy(buffer).view(first.dtype).view(len(tensors), *first.shape)
    return rows.flatten(0, 1) if joined else rows


class Delivery(Protocol):
    """Given entries and, for each, the tensor in it: what ``torch.stack`` would give. None where it can't."""

    on_device: bool

    def rows(self, entries: Sequence[Found], leaves: Sequence[Leaf]) -> torch.Tensor | None: ...


class HostDelivery:
    """Into buffers on the CPU that are used again."""

    on_device = False

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool

    def rows(self, entries: Sequence[Found], leaves: Sequence[Leaf]) -> torch.Tensor | None:
        return assemble(entries, leaves, self.pool)


class DeviceDelivery:
    """Straight from the slab to the device on the copier's side stream; the CPU doesn't wait for the copies."""

    on_device = True

    def __init__(self, copier: Copier[torch.Tensor]) -> None:
        self._copier = copier

    def rows(self, entries: Sequence[Found], leaves: Sequence[Leaf]) -> torch.Tensor | None:
        import torch

        dtype: torch.dtype = getattr(torch, leaves[0].dtype)
        size = leaves[0].count * dtype.itemsize
        flat = self._copier.copy(
            [
                SlabRange(entry.segment.slab, entry.slot.offset + leaf.offset, size)
                for entry, leaf in zip(entries, leaves, strict=True)
            ]
        )
        return None if flat is None else rows_of(flat.view(dtype), leaves[0], len(entries))
