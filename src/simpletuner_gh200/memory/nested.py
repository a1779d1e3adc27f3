"""Every tensor in a batch, or in a value of an optimizer's state, however it is nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEEPEST = 8
"""Two or three levels are usual; this only stops what contains itself."""


def tensors_in(value: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """With the keys that lead there; items of a list belong under the list's own key."""
    import torch

    def walk(inner: Any, keys: tuple[str, ...], depth: int) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        if isinstance(inner, torch.Tensor):
            yield keys, inner
        elif depth == DEEPEST:
            return
        elif isinstance(inner, list | tuple):
            for item in inner:
                yield from walk(item, keys, depth + 1)
        else:
            if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
                inner = vars(inner)
            if isinstance(inner, Mapping):
                for key, item in inner.items():
                    yield from walk(item, (*keys, str(key)), depth + 1)

    return walk(value, (), 0)
