"""A prepared batch, as far as its tensors matter: which there are, and the shape under which its step is known."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from simpletuner_gh200.memory.nested import tensors_in


def shape_of(batch: Mapping[str, Any]) -> Hashable:
    """Steps of the same shape save the same tensors in the same order, and nearly the same bytes.

    Some models' captions are as long as they are written, and there would be a shape for each length: so lengths that
    differ by less than an eighth are one. Pictures, which take most of the memory, are taken as they are.
    """
    named = ((".".join(keys), tensor) for keys, tensor in tensors_in(batch))
    return BatchShape((name, _sizes(name, tensor)) for name, tensor in named if tensor.dim() > 1)


_CAPTIONS = ("embed", "encoder", "prompt", "text", "mask")


def _sizes(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    caption = tensor.dim() <= 3 and any(part in name for part in _CAPTIONS)
    return tuple(_about(size) for size in tensor.shape) if caption else tuple(tensor.shape)


def _about(size: int) -> int:
    """Rounded up, in eight steps from one power of two to the next; up to 16 as it is."""
    step = max(1, 1 << (size.bit_length() - 4)) if size > 16 else 1
    return -(-size // step) * step


class BatchShape(tuple[tuple[str, tuple[int, ...]], ...]):
    """Names and sizes; as text, those of the latents."""

    __slots__ = ()

    def __str__(self) -> str:
        latents = [size for name, size in self if "latents" in name] or [size for _name, size in self]
        return "x".join(map(str, latents[0])) if latents else "no tensors"


def weights_of(*owners: Any) -> Iterator[torch.Tensor]:
    """Parameters and buffers of the models that these objects hold, in attributes or lists of them."""
    held = (value for owner in owners for value in vars(owner).values())
    each = (one for value in held for one in (value if isinstance(value, list | tuple) else (value,)))
    for module in dict.fromkeys(one for one in each if isinstance(one, torch.nn.Module)):
        yield from module.parameters()
        yield from module.buffers()
