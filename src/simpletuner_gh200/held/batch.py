"""Batches assembled straight from published bytes: one copy per sample, into a buffer that is used again, or straight
to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from simpletuner_gh200.held.buffers import BufferPool, address_of, copy_rows
from simpletuner_gh200.held.cache import Found
from simpletuner_gh200.held.record import Leaf, contiguous_strides, copying_maker
from simpletuner_gh200.held.segment import Bytes

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.memory.lane import Copier


def same_tensor(leaves: Sequence[Leaf | None]) -> Leaf | None:
    """The first leaf, if all are there and alike but for place and strides, and can be stacked here.

    Strides may differ: a lone remainder of a VAE batch comes contiguous, the others channels-last.
    """
    first = leaves[0]
    if first is None or first.grad or not first.count:
        return None
    if leaves.count(first) == len(leaves):  # of one layout, as most batches are; that is seen by identity first
        return first
    alike = (first.dtype, first.shape, False)
    same = all(leaf is not None and (leaf.dtype, leaf.shape, leaf.grad) == alike for leaf in leaves)
    return first if same else None


@lru_cache(maxsize=4096)
def stack_strides(shape: tuple[int, ...], strides: tuple[tuple[int, ...] | None, ...]) -> tuple[int, ...]:
    """The strides that ``torch.stack`` gives to such tensors; latents often come channels-last."""
    import torch

    if not any(strides):
        return contiguous_strides((len(strides), *shape))
    tensors = [torch.empty_strided(shape, own or contiguous_strides(shape)) for own in strides]
    return tuple(torch.stack(tensors).stride())


def rows_of(flat: torch.Tensor, leaf: Leaf, count: int) -> torch.Tensor:
    """So many payloads, one after the other in ``flat``, as ``torch.stack`` of the tensors would give them."""
    import torch

    shape = (count, *leaf.shape)
    rows = torch.as_strided(flat, shape, (leaf.count, *(leaf.strides or contiguous_strides(leaf.shape))))
    wanted = stack_strides(leaf.shape, (leaf.strides,) * count)
    if tuple(rows.stride()) == wanted:
        return rows
    return torch.empty_strided(shape, wanted, dtype=rows.dtype, device=rows.device).copy_(rows)


def assemble(entries: Sequence[Found], leaves: Sequence[Leaf], pool: BufferPool) -> torch.Tensor:
    """What ``torch.stack`` of those tensors would give. The leaves must be alike: see ``same_tensor``."""
    leaf, count = leaves[0], len(entries)
    alike = leaves.count(leaf) == count  # of one layout, as most batches are
    stack = leaf.stacks.get(count) if alike else None
    if stack is None:
        stack = _stack_of(leaves)
        if alike:
            leaf.stacks[count] = stack
    buffer = pool.get(stack.row * count)
    batch = stack.tensor_on(buffer)
    if stack.by_row:
        # By address: slicing arrays would cost as much as copying a small latent.
        places = [one.address for one in entries if one.address is not None]
        if len(places) < count:  # some are in packs
            for row, entry, place in zip(buffer.reshape(count, -1), entries, leaves, strict=True):
                entry.copy_into(row, place.offset)
        elif alike:
            copy_rows(address_of(buffer), places, stack.row, skip=leaf.offset)
        else:
            places = [start + place.offset for start, place in zip(places, leaves, strict=True)]
            copy_rows(address_of(buffer), places, stack.row)
    else:
        for row, entry, place in zip(batch, entries, leaves, strict=True):
            row.copy_(copying_maker(entry.payload)(place))
    return batch


@dataclass(frozen=True)
class _Stack:
    """So many tensors as ``torch.stack`` gives them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """None where they are contiguous."""
    row: int
    """Bytes of each."""
    by_row: bool
    """Each lies in one piece in the stack, as it does by itself."""

    def tensor_on(self, buffer: Bytes) -> torch.Tensor:
        import torch

        flat = torch.frombuffer(buffer, dtype=self.dtype)
        return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)


def _stack_of(leaves: Sequence[Leaf]) -> _Stack:
    import torch

    leaf, shape = leaves[0], (len(leaves), *leaves[0].shape)
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    wanted = stack_strides(leaf.shape, tuple(one.strides for one in leaves))
    alike = all(one.strides == leaf.strides for one in leaves)
    by_row = alike and (leaf.strides is None or wanted[1:] == leaf.strides)
    strides = None if wanted == contiguous_strides(shape) else wanted
    return _Stack(dtype, shape, strides, leaf.count * dtype.itemsize, by_row)


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


Delivery = Callable[[Sequence[Found], Sequence[Leaf]], "torch.Tensor | None"]
"""Given entries and, for each, the tensor in it: what ``torch.stack`` would give. None where it can't."""


class DeviceDelivery:
    """Straight from held memory to the device on the copier's side stream; the CPU doesn't wait for the copies."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._pool = BufferPool()

    def __call__(self, entries: Sequence[Found], leaves: Sequence[Leaf]) -> torch.Tensor | None:
        import torch

        dtype: torch.dtype = getattr(torch, leaves[0].dtype)
        size = leaves[0].count * dtype.itemsize
        pieces = [
            entry.segment.bytes_at(entry.offset + leaf.offset, size)
            for entry, leaf in zip(entries, leaves, strict=True)
            if entry.segment.slab is not None
        ]
        if len(pieces) < len(entries):  # some are still in packs: joined here, and brought over like any other tensor
            return assemble(entries, leaves, self._pool)
        flat = self._copier.copy(pieces)
        if flat is None:
            return None
        if len({leaf.strides for leaf in leaves}) == 1:
            return rows_of(flat.view(dtype), leaves[0], len(entries))
        rows = zip(flat.view(dtype).chunk(len(entries)), leaves, strict=True)
        return torch.stack(
            [torch.as_strided(row, leaf.shape, leaf.strides or contiguous_strides(leaf.shape)) for row, leaf in rows]
        )
