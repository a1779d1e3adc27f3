"""Host memory standing in for Grace where there is no device: the same catching, the same limit, the same counting."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext

import torch

from simpletuner_gh200.memory.pool.pool import PoolState, Share, out_of_pool
from simpletuner_gh200.model.tensors import like, size_of


class HostPool:
    mechanism = "host memory standing in"
    device = "cpu"

    def __init__(self, limit: int, why: str = "") -> None:
        self._limit = limit
        self._why = why
        self._blocks: dict[int, int] = {}
        """Of every block that is alive: address -> bytes."""
        self._held = self._peak = self._allocations = self._refused = 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        size = size_of(tensor)
        if self._held + size > self._limit:
            self._refused += 1
            raise torch.OutOfMemoryError(out_of_pool(size, self.state(), self._why))
        fresh = like(tensor)
        storage = fresh.untyped_storage()
        self._blocks[storage.data_ptr()] = size
        self._held += size
        self._allocations += 1
        self._peak = max(self._peak, self._held)
        weakref.finalize(storage, self._gone, storage.data_ptr())
        return fresh

    def _gone(self, address: int) -> None:
        self._held -= self._blocks.pop(address, 0)

    def use(self) -> AbstractContextManager[None]:
        """What is allocated inside is host memory anyway, and moves when it is swept."""
        return nullcontext()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._blocks

    def share(self) -> Share:
        """Without a device torch counts nothing."""
        return Share()

    def state(self) -> PoolState:
        return PoolState(self._held, self._peak, self._limit, self._allocations, self._refused)
