"""Bytes of tensors by their storages: what is alive, what autograd keeps. For real and for fake tensors alike."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Storage -> bytes, each counted once however many tensors look at it."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in found}


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that were made while it is on and still live, and the most there ever were.

    ``known`` are storages that were there before: weights, and the batch.
    """

    def __init__(self, known: Collection[int] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = known
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class SavedBytes:
    """What autograd keeps for backward: each storage once, without those that are ``known``."""

    def __init__(self, known: Collection[int]) -> None:
        self.bytes = self.tensors = 0
        self._known = known
        self._held: dict[int, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        self._held.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self.tensors += 1
            if storage._cdata not in self._held:
                # Held while it is counted: its address must not be used again for another one.
                self._held[storage._cdata] = storage
                self.bytes += storage.nbytes()
        return tensor


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Floating point operations of matrix products, convolutions and attention.

    By torch's own formulas, but without its counter, which watches modules with hooks that keep tensors alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=made))
        return made
