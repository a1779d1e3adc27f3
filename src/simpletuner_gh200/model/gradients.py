"""Gradients that live in the pool: each is moved there as autograd has accumulated it.

The first of a window is moved, not added to zeros (that would make +0.0 of -0.0); later ones torch adds to it where it
is, as it adds to the zeros that ``zero_grad(set_to_none=False)`` leaves there. Clipping, scaling and the optimizer find
an ordinary ``p.grad`` of the parameter's device. The memory of one window is that of the next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from simpletuner_gh200.memory.lane import Lane, StillUnderWay, Ticket, spot_of
from simpletuner_gh200.model.catching import StatePool
from simpletuner_gh200.model.tensors import like, owns_its_storage, size_of, storage_users
from simpletuner_gh200.units import GIB

logger = logging.getLogger("simpletuner_gh200")

IN_FLIGHT = GIB
"""Bytes on their way to the pool; beyond it the oldest is waited for, on the device."""


class PooledGradients:
    """One per rank."""

    def __init__(self, pool: StatePool, lane: Lane, *, smallest: int = 0, at_once: bool = False) -> None:
        """``at_once``: others read gradients while backward runs, as DistributedDataParallel does."""
        self._pool = pool
        self._lane = lane
        self._smallest = smallest
        self._at_once = at_once
        self._homes: dict[torch.Tensor, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._under_way: dict[torch.Tensor, tuple[Ticket, torch.Tensor]] = {}
        """By parameter, the oldest first: the copy, and what it reads."""
        self._sending = 0
        self.moved = self.failed = 0
        """Bytes over the run; copies that failed, whose gradients stayed."""

    def install(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.requires_grad and size_of(parameter) >= self._smallest:
                self._hooks.append(parameter.register_hook(partial(self._about_to_accumulate, parameter)))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

    def remove(self) -> None:
        self.settle()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def give_back(self) -> None:
        """They live on the device from now on."""
        self.remove()
        for parameter, home in self._homes.items():
            if parameter.grad is not None and self._pool.holds(parameter.grad):
                parameter.grad = like(home).copy_(home)
        self._homes.clear()

    def settle(self) -> None:
        """The current stream's next work finds every gradient at home."""
        while self._under_way:
            self._release(next(iter(self._under_way)))

    def count(self) -> tuple[int, int]:
        """(tensors, bytes) of the homes."""
        return len(self._homes), sum(map(size_of, self._homes.values()))

    def _about_to_accumulate(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if parameter in self._under_way:
            self._release(parameter)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if grad is None or type(grad) is not torch.Tensor or not owns_its_storage(grad) or self._pool.holds(grad):
            return
        size = size_of(grad)
        if not size or grad.device.type != self._pool.device:
            return
        home = self._home(parameter, grad)
        while self._under_way and self._sending + size > IN_FLIGHT:
            self._release(next(iter(self._under_way)))
        try:
            ticket = self._lane.copy([(spot_of(home), spot_of(grad), size)], self._lane.here())
        except RuntimeError as refused:
            self.failed += 1
            if isinstance(refused, StillUnderWay):
                del self._homes[parameter]
            if self.failed == 1:
                logger.warning("gh200: a gradient stays on the device: %s (said once)", str(refused))
            return
        self._under_way[parameter] = ticket, grad
        self._sending += size
        self.moved += size
        parameter.grad = home
        if self._at_once:
            self.settle()
        while self._under_way:
            oldest, (ticket, _grad) = next(iter(self._under_way.items()))
            if not self._lane.done(ticket):
                break
            self._release(oldest)

    def _home(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """That of the window before, unless somebody still looks at it."""
        home = self._homes.get(parameter)
        like = home is not None and home.stride() == grad.stride() and home.dtype == grad.dtype
        if home is not None and like and storage_users(home) == 1:
            return home.detach()
        fresh = self._pool.take(grad)
        self._homes[parameter] = fresh
        return fresh.detach()

    def _release(self, parameter: torch.Tensor) -> None:
        ticket, grad = self._under_way[parameter]
        self._lane.wait(ticket)  # where that fails it is still under way
        del self._under_way[parameter]
        self._sending -= size_of(grad)
