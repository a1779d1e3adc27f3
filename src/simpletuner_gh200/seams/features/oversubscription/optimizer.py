"""Optimizer state that is born in the pool: the steps that create it run inside, the others as always."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from simpletuner_gh200.memory.pool.pool import Pool
from simpletuner_gh200.seams.patch import Patches, wrap_method


class PooledOptimizer:
    """Wraps ``step`` of one optimizer, on the instance."""

    def __init__(self, optimizer: Any, pool: Pool, born: Callable[[list[Any]], None]) -> None:
        """``born`` hears of the state tensors that a step has just made."""
        # accelerate's wrapper calls the optimizer it holds; that one makes the state.
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self._pool = pool
        self._born = born
        self._complete = False
        self._patches = Patches()

    def install(self) -> None:
        self._patches.install(wrap_method(self.optimizer, "step", self._step))

    def uninstall(self) -> None:
        self._patches.remove()

    def _step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not self._creates_state():
            return wrapped(*args, **kwargs)
        before = {id(tensor) for tensor in self.state_tensors()}
        with self._pool.use():
            result = wrapped(*args, **kwargs)
        self._born([tensor for tensor in self.state_tensors() if id(tensor) not in before])
        return result

    def _creates_state(self) -> bool:
        """State is made for a parameter at its first step with a gradient; once all have theirs, nobody looks again."""
        if self._complete:
            return False
        state = self.optimizer.state
        without = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if not state.get(parameter)
        ]
        self._complete = not without
        return any(parameter.grad is not None for parameter in without)

    def state_tensors(self) -> Iterator[Any]:
        import torch

        for values in self.optimizer.state.values():
            if isinstance(values, dict):
                yield from (value for value in values.values() if isinstance(value, torch.Tensor))
