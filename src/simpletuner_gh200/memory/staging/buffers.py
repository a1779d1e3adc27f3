"""Memory on the receiving side of staging: torch's, so that its statistics and its stream rules cover it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from simpletuner_gh200.memory.dlpack import tensor_at
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.mapping import Region

if TYPE_CHECKING:
    import torch


class Buffer(Protocol):
    address: int

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def used_on(self, stream: int) -> None:
        """Work queued on ``stream`` from here on reads it: don't reuse its memory before that is done."""


class Buffers(Protocol):
    """Hands out one buffer per batch; it goes back when the last tensor on it is gone."""

    ordinal: int

    def take(self, size: int, stream: int) -> Buffer: ...

    def consumer_stream(self) -> int:
        """The stream on which the calling thread's next work will be queued."""


class TorchBuffers:
    """Buffers of torch's own allocator, on a CUDA device or, without one, on the CPU."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        import torch

        self.device = torch.device(device)
        self.ordinal = self.device.index or 0

    def take(self, size: int, stream: int) -> _TorchBuffer:
        import torch

        if self.device.type != "cuda":
            return _TorchBuffer(torch.empty(size, dtype=torch.uint8), cuda=False)
        # Allocated as the side stream's memory: the allocator then knows that the copy comes first.
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device)):
            return _TorchBuffer(torch.empty(size, dtype=torch.uint8, device=self.device), cuda=True)

    def consumer_stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.device.type == "cuda" else 0


class _TorchBuffer:
    def __init__(self, memory: torch.Tensor, *, cuda: bool) -> None:
        self._memory = memory
        self._cuda = cuda
        self.address = int(memory.data_ptr())

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self._memory[offset : offset + size].view(dtype).view(tuple(shape))

    def used_on(self, stream: int) -> None:
        if self._cuda:
            import torch

            self._memory.record_stream(torch.cuda.ExternalStream(stream, device=self._memory.device))


class DriverBuffers:
    """Device memory straight from the driver: for the selftest, which must not depend on torch's allocator."""

    def __init__(self, driver: Driver, ordinal: int = 0) -> None:
        self._driver = driver
        self.ordinal = ordinal

    def take(self, size: int, stream: int) -> _DriverBuffer:
        address = self._driver.alloc_device(size, self.ordinal)
        region = Region(address, size, partial(_give_back, self._driver, address, self.ordinal, os.getpid()))
        return _DriverBuffer(region, self.ordinal)

    def consumer_stream(self) -> int:
        return 0


class _DriverBuffer:
    """Freed with its last holder; the driver waits for pending work before it takes memory back."""

    def __init__(self, region: Region, ordinal: int) -> None:
        self._region = region
        self._ordinal = ordinal
        self.address = region.address

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return tensor_at(self._region, self.address + offset, shape, dtype, "cuda", self._ordinal)

    def used_on(self, stream: int) -> None:
        """Nothing to note: freeing synchronizes."""


def _give_back(driver: Driver, address: int, ordinal: int, pid: int) -> None:
    if os.getpid() == pid:
        driver.free(address, ordinal)
