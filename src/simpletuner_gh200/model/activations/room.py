"""How much HBM saved tensors may take: what is free, less what a step needs besides them, less the reserve."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from simpletuner_gh200.memory.ceilings import activations_room
from simpletuner_gh200.memory.driver.interface import Driver


class Room(Protocol):
    def begin(self) -> None:
        """A step begins whose needs are to be learned: all that it saves leaves the device."""

    def end(self) -> None:
        """A backward pass of that step is over, and nothing came after it. There may be more than one."""

    def bytes(self) -> int:
        """For the step that begins now."""


class NoRoom:
    """Without a device there is no HBM to keep anything in: all of it moves, so that moving can be tried and proven."""

    def begin(self) -> None:
        return None

    def end(self) -> None:
        return None

    def bytes(self) -> int:
        return 0


class DeviceRoom:
    """Of a device, by its driver and torch's own statistics.

    Gradients are there at some steps and born in others; they are counted with what a step needs, never twice.
    """

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        reserve: int,
        trained: Callable[[], Iterable[torch.Tensor]],
        idle_in_grace: Callable[[], int] = lambda: 0,
    ) -> None:
        """``idle_in_grace``: what torch counts as cached on the device without its being HBM."""
        self._driver = driver
        self._device = device
        self._reserve = reserve
        self._trained = trained
        self._idle_in_grace = idle_in_grace
        self._before = 0
        self._needs = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = self._lasting()

    def end(self) -> None:
        self._needs = max(self._needs, torch.cuda.max_memory_allocated(self._device) - self._before)

    def bytes(self) -> int:
        free, total = self._driver.memory_info(self._device.index or 0)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        cached = max(cached - self._idle_in_grace(), 0)
        return activations_room(free + cached + self._gradients(), total, self._needs, self._reserve)

    def _lasting(self) -> int:
        """Allocated now and for the whole step."""
        return int(torch.cuda.memory_allocated(self._device)) - self._gradients()

    def _gradients(self) -> int:
        return sum(weight.grad.nbytes for weight in self._trained() if weight.grad is not None)
