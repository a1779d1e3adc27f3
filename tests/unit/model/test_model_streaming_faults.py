"""Whatever fails in a streaming step, wherever: every tensor is at its home afterwards, with its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from simpletuner_gh200.memory.lane import Lane, Move
from simpletuner_gh200.model.catching import CaughtOptimizer, HostPool, Keeper
from simpletuner_gh200.model.placement import Placement
from simpletuner_gh200.model.streaming import StreamedOptimizer
from tests.unit.model.momentum import Momentum

LOOKS = {"__get__", "size", "stride", "storage_offset", "element_size", "numel", "dim", "untyped_storage", "data_ptr"}
SWITCH = "_set_grad_enabled"
SHOWS = torch.Tensor.grad.__set__  # type: ignore[attr-defined]
NAMES = ("momentum", "square")


class Trouble(Exception):
    """What a driver or an allocator might say."""


class Faults(TorchFunctionMode):
    """Every call of torch's and of a lane is counted, and one of them fails; or all copies from it on."""

    def __init__(self, nth: int = 0, *, lasting: bool = False) -> None:
        super().__init__()
        self.nth, self.calls, self.counts = nth, 0, False
        self._lasting = lasting

    def call(self, what: object) -> None:
        if self.counts:
            self.calls += 1
            lasts = self._lasting and self.calls > self.nth > 0 and what is torch.Tensor.copy_
            if self.calls == self.nth or lasts:
                raise Trouble(f"call {self.calls}: {what}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in {*LOOKS, SWITCH} and func != SHOWS:  # which can't fail
            self.call(func)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.counts = True
        try:
            with self:
                yield
        finally:
            self.counts = False


class Faulty(Lane):
    """Each of its calls may fail, before or after it has done what it was called for."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(torch.device("cpu"))
        self._call = faults.call

    def copy(self, moves: Iterable[Move], *after: Any) -> None:
        self._call("copy in")
        super().copy(moves, *after)
        self._call("copy out")

    def wait(self, ticket: Any, brought: torch.Tensor | None = None) -> None:
        self._call("wait")

    def settle(self) -> None:
        self._call("settle")


class Bench:
    """Five parameters in four chunks, whose state is made and at home; then what a step of an optimizer does to it."""

    def __init__(self, faults: Faults, change: Callable[[Momentum], None]) -> None:
        self._faults, self._change = faults, change
        self.weights = [torch.nn.Parameter(torch.linspace(0, 1, 100 * (number + 1))) for number in range(5)]
        self.optimizer = Momentum(self.weights, lr=0.1)
        self._caught = CaughtOptimizer(self.optimizer, Keeper(HostPool(1 << 20), Placement("cpu_first", 0)))
        self.streamed = StreamedOptimizer(self._caught, (Faulty(faults), Faulty(faults)), room=3000)
        for number, weight in enumerate(self.weights):
            weight.grad = torch.linspace(-1, number, weight.numel())
        self.streamed.step(self.optimizer.step)
        self.homes = {(weight, name): self.storage(weight, name) for weight in self.weights for name in NAMES}
        self.gradients = [weight.grad for weight in self.weights]
        self.expected = self.values()

    def step(self) -> None:
        """``expected`` is what the optimizer has left behind, chunk by chunk."""

        def watched() -> None:
            try:
                self._change(self.optimizer)
            finally:
                self._faults.counts, before = False, self._faults.counts
                self.expected = self.values()
                self._faults.counts = before

        with self._faults.counting():
            self.streamed.step(watched)

    def values(self) -> dict[Any, torch.Tensor]:
        state = self.optimizer.state
        return {(weight, name): state[weight][name].clone() for weight in self.weights for name in NAMES}

    def storage(self, weight: torch.Tensor, name: str) -> int:
        return int(self.optimizer.state[weight][name].untyped_storage().data_ptr())

    def is_home(self) -> None:
        for (weight, name), home in self.homes.items():
            assert self.storage(weight, name) == home, f"{name} of {weight.numel()} is not at home"
        for key, now in self.values().items():
            assert now.equal(self.expected[key]), f"{key[1]} of {key[0].numel()} has other bytes"
        assert all(weight.grad is before for weight, before in zip(self.weights, self.gradients, strict=True))


def halves_and_views(optimizer: Momentum) -> None:
    """State that is made anew out of the memory that it has now: another shape, and only the later half."""
    optimizer.step()
    for weight in optimizer.param_groups[0]["params"]:
        if weight.grad is not None:
            state = optimizer.state[weight]
            state["momentum"] = state["momentum"].view(2, -1)
            state["square"] = state["square"][weight.numel() // 2 :]


@pytest.mark.parametrize("change", [Momentum.step, halves_and_views])
def test_every_call_fails_once(change: Callable[[Momentum], None]) -> None:
    unharmed = Faults()
    bench = Bench(unharmed, change)
    bench.step()
    bench.is_home()
    assert unharmed.calls > 80
    for nth in range(1, unharmed.calls + 1):
        faults = Faults(nth)
        bench = Bench(faults, change)
        with pytest.raises(Trouble, match=f"call {nth}:"):
            bench.step()
        bench.is_home()


def test_what_no_copy_can_bring_home_keeps_its_bytes() -> None:
    """The device is as good as lost; should it not be, a later step goes on from there."""
    unharmed = Faults()
    Bench(unharmed, Momentum.step).step()
    for nth in range(1, unharmed.calls + 1, 3):
        faults = Faults(nth, lasting=True)
        bench = Bench(faults, Momentum.step)
        with pytest.raises(Trouble):
            bench.step()
        assert all(now.equal(bench.expected[key]) for key, now in bench.values().items())
        before, faults.nth = bench.values(), 0
        bench.step()
        for weight in bench.weights:
            assert weight.grad is not None
            assert bench.values()[weight, "momentum"].equal(before[weight, "momentum"] + weight.grad)
