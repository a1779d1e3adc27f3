"""A tensor of state as its bytes: going down into wrapper subclasses, and giving it another home in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes: itself, or those inside a wrapper (DTensor, quantised states), however deep."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _context = flatten()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from plain_tensors(inner)


def size_of(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def owns_its_storage(tensor: torch.Tensor) -> bool:
    """Is it all of its storage, each byte once? A view of something larger can't move without what it is a view of."""
    step = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != step:
            return False  # gaps, or the same bytes several times
        step *= length
    return int(tensor.untyped_storage().nbytes()) == size_of(tensor)


def shares_storage(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None:
        return False
    place = tensor.untyped_storage().data_ptr()
    return any(place == part.untyped_storage().data_ptr() for part in plain_tensors(other))


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Fresh memory with the same shape, strides and type; no random number is consumed."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def move_to(tensor: torch.Tensor, home: torch.Tensor) -> None:
    """Copy and re-point in place: whoever has the tensor in a variable of his own has the new home too."""
    home.copy_(tensor.data)
    tensor.data = home


def view_of(there: torch.Tensor, layout: tuple[torch.dtype, Sequence[int], Sequence[int]], offset: int) -> torch.Tensor:
    """A tensor of that type, shape and strides over the memory of another."""
    dtype, shape, stride = layout
    if dtype is there.dtype:
        return torch.as_strided(there, shape, stride, offset)
    return torch.empty(0, dtype=dtype, device=there.device).set_(there.untyped_storage(), offset, shape, stride)


def storage_users(tensor: torch.Tensor) -> int:
    """Tensors that look at this one's memory, itself among them."""
    return _counted(tensor) - _BY_ASKING


def _counted(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_BY_ASKING = _counted(torch.empty(1)) - 1
"""On some torches the storage's own object, which asking makes, counts as well."""
