"""Model state on its way to its home: each tensor goes there by itself, so that one of them is in HBM too many.

A tensor that is to live in the pool is copied there and re-pointed in place, so that the optimizer's own variables go
with it. It is met where it enters ``optimizer.state``: while a step makes state that is a dict of ours, whose entries
look at what is stored in them; what is loaded is looked at before the optimizer has it. Afterwards there are plain
dicts, because checkpoints pickle them, and what was not seen (tensors appended to a list, state replaced in later
steps) is swept up; a sweep that finds every tensor where it was ends there.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from simpletuner_gh200.memory.nested import tensors_in
from simpletuner_gh200.memory.pool.pool import PoolState, Share, out_of_pool
from simpletuner_gh200.model.placement import Placement
from simpletuner_gh200.model.tensors import (
    like,
    move_to,
    owns_its_storage,
    plain_tensors,
    shares_storage,
    size_of,
)


class StatePool(Protocol):
    """Memory that state can live in: Grace memory behind ``torch.cuda.MemPool``, or host memory standing in."""

    mechanism: str
    device: str
    """Type of the device whose tensors it takes in."""

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fresh memory of the pool for a tensor like this; torch.OutOfMemoryError where there is none."""

    def holds(self, tensor: torch.Tensor) -> bool: ...


class HostPool:
    """Host memory standing in for Grace where there is no device: the same limit, the same counting."""

    mechanism = "host memory standing in"
    device = "cpu"
    ordinal = 0
    reserve = None

    def __init__(self, limit: int, why: str = "") -> None:
        self._limit = limit
        self._why = why
        self._blocks: dict[int, tuple[StorageWeakRef, int]] = {}
        """Address -> the block's storage and its bytes; what has gone is dropped when the rest is counted."""
        self._lock = threading.RLock()
        """Gradients are taken in by autograd's threads."""
        self._peak = self._allocations = self._refused = 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        size = size_of(tensor)
        with self._lock:
            held = self._held()
            if held + size > self._limit:
                self._refused += 1
                raise torch.OutOfMemoryError(out_of_pool(size, self.state(), self._why))
            fresh = like(tensor)
            storage = fresh.untyped_storage()
            self._blocks[storage.data_ptr()] = StorageWeakRef(storage), size
            self._allocations += 1
            self._peak = max(self._peak, held + size)
        return fresh

    def _held(self) -> int:
        # Asked of torch: a finalizer on Python's view of a storage may run while tensors still use the storage.
        with self._lock:
            self._blocks = {address: block for address, block in self._blocks.items() if not block[0].expired()}
            return sum(size for _storage, size in self._blocks.values())

    def use(self) -> AbstractContextManager[None]:
        """What is allocated inside is host memory anyway, and moves when it is swept."""
        return nullcontext()

    def holds(self, tensor: torch.Tensor) -> bool:
        found = self._blocks.get(tensor.untyped_storage().data_ptr())
        return found is not None and not found[0].expired()

    def share(self) -> Share:
        """Without a device torch counts nothing."""
        return Share()

    def state(self) -> PoolState:
        return PoolState(self._held(), self._peak, self._limit, self._allocations, self._refused)


@dataclass
class Tally:
    """Where state is now, counted anew at every sweep."""

    tensors: int = 0
    bytes: int = 0
    """In the pool."""
    hbm_tensors: int = 0
    hbm_bytes: int = 0
    """Worth placing, and kept on the device within the budget."""
    small_tensors: int = 0
    small_bytes: int = 0
    """Counters, small tensors, and those that can't move: views, CPU tensors, what is shared with a parameter."""

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Keeper:
    """Gives tensors their home. One per pool; optimizers and EMA share its budget, each under a name of its own."""

    def __init__(self, pool: StatePool, placement: Placement) -> None:
        self.pool = pool
        self.placement = placement
        self._kept: dict[str, dict[int, int]] = defaultdict(dict)
        """Of state that stays on the device within the budget, by owner: address -> bytes."""
        self.in_hbm = 0
        """All of that together."""

    def keep(self, owner: str, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> None:
        """Give a tensor, or the tensors inside it, their home, unless they have it."""
        kept = self._kept[owner]
        for part in plain_tensors(tensor):
            if self._stray(part, parameter, kept):
                self._settle(part, kept)

    def bring(self, owner: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        """The same for a tensor that was loaded somewhere, and belongs on the device of its parameter."""
        for part in plain_tensors(tensor):
            if self.placement.takes(size_of(part), part.dim()) and part.device != parameter.device:
                part.data = part.data.to(parameter.device)
        self.keep(owner, tensor, parameter)

    def sweep(self, owner: str, state: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> Tally:
        """All state of one owner, each with the parameter it belongs to: strays get their home, all is counted."""
        before, found, kept = self._kept[owner], Tally(), dict[int, int]()
        for tensor, parameter in state:
            for part in plain_tensors(tensor):
                if self._stray(part, parameter, before):
                    self._settle(part, before)
                size = size_of(part)
                if self.pool.holds(part):
                    found.tensors, found.bytes = found.tensors + 1, found.bytes + size
                elif before.get(part.data_ptr()) == size:
                    kept[part.data_ptr()] = size
                    found.hbm_tensors, found.hbm_bytes = found.hbm_tensors + 1, found.hbm_bytes + size
                else:
                    found.small_tensors, found.small_bytes = found.small_tensors + 1, found.small_bytes + size
        self.in_hbm -= sum(before.values()) - sum(kept.values())  # what is gone no longer counts
        self._kept[owner] = kept
        return found

    def promote(self, owner: str, tensors: Iterable[torch.Tensor]) -> int:
        """Move what the pool holds to HBM as far as the budget goes; returns how many bytes."""
        moved = 0
        for tensor in tensors:
            for part in plain_tensors(tensor):
                size = size_of(part)
                if self.pool.holds(part) and self.placement.home(size, self.in_hbm) == "hbm":
                    move_to(part, like(part))
                    self._settle(part, self._kept[owner])
                    moved += size
        return moved

    def _stray(self, part: torch.Tensor, parameter: torch.Tensor | None, kept: dict[int, int]) -> bool:
        """May this plain tensor have a home of our choice, and has none yet?"""
        size = size_of(part)
        if not self.placement.takes(size, part.dim()) or part.device.type != self.pool.device:
            return False
        if kept.get(part.data_ptr()) == size or self.pool.holds(part) or not owns_its_storage(part):
            return False
        # Looked at now and not before the step: some optimizers re-assign the gradient on the way.
        others = () if parameter is None else (parameter, parameter.grad)
        return not any(shares_storage(part, other) for other in others)

    def _settle(self, part: torch.Tensor, kept: dict[int, int]) -> None:
        if self.placement.home(size_of(part), self.in_hbm) == "hbm":
            self.in_hbm += size_of(part) - kept.get(part.data_ptr(), 0)
            kept[part.data_ptr()] = size_of(part)
        else:
            move_to(part, self.pool.take(part))


class _Watched(defaultdict[Any, Any]):
    """A dict that is seen to by ``__setitem__``, whichever way something is stored."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]
        self.update(other)
        return self


class _Entry(_Watched):
    """The state of one parameter while it is being made."""

    def __init__(self, values: dict[Any, Any], caught: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._caught = caught
        self.update(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        for _keys, tensor in tensors_in(value):
            self._caught(tensor)
        super().__setitem__(key, value)


class _CatchingState(_Watched):
    """Stands for ``optimizer.state`` during a step that makes state."""

    def __init__(self, plain: dict[Any, Any], keep: Callable[..., None]) -> None:
        super().__init__()
        self._keep = keep
        self.update(plain)

    def __missing__(self, parameter: Any) -> Any:
        self[parameter] = {}
        return self[parameter]

    def __setitem__(self, parameter: Any, values: Any) -> None:
        if isinstance(values, dict) and isinstance(parameter, torch.Tensor):
            values = _Entry(values, partial(self._keep, parameter=parameter))
        super().__setitem__(parameter, values)

    def plain(self) -> Iterator[tuple[Any, Any]]:
        for parameter, values in self.items():
            yield parameter, dict(values) if isinstance(values, _Entry) else values


class CaughtOptimizer:
    """One optimizer whose state lives where the keeper puts it; whoever wraps its step calls ours."""

    def __init__(self, optimizer: Any, keeper: Keeper, name: str = "optimizer") -> None:
        # accelerate's wrapper calls the optimizer it holds; that one makes the state.
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.keeper = keeper
        self.name = name
        self.tally = Tally()
        self._places: list[int] | None = None
        """Where each tensor of state was when it was last swept; None where that does not say it all."""

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``original`` with its state caught where it makes any, and swept up afterwards."""
        result = self._caught(original, *args, **kwargs) if self.makes_state() else original(*args, **kwargs)
        self.sweep()
        return result

    def load(self, original: Callable[..., Any], loaded: Any, *args: Any, **kwargs: Any) -> Any:
        """``original`` with what it loads at home already: no copy is made of a tensor that is where it is to be."""
        if isinstance(loaded, Mapping) and {"state", "param_groups"} <= loaded.keys():
            numbers = (number for group in loaded["param_groups"] for number in group["params"])
            parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
            for number, parameter in zip(numbers, parameters, strict=False):  # the optimizer refuses what doesn't match
                for _keys, tensor in tensors_in(loaded["state"].get(number, {})):
                    self.keeper.bring(self.name, tensor, parameter)
        result = original(loaded, *args, **kwargs)
        self.sweep()
        return result

    def makes_state(self) -> bool:
        """State is made for a parameter at its first step with a gradient."""
        state = self.optimizer.state
        return any(
            parameter.grad is not None and not state.get(parameter)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        )

    def _caught(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plain = self.optimizer.state
        catching = _CatchingState(plain, partial(self.keeper.keep, self.name))
        self.optimizer.state = catching
        try:
            return original(*args, **kwargs)
        finally:
            plain.clear()
            plain.update(catching.plain())
            self.optimizer.state = plain

    def sweep(self) -> None:
        """Every tensor of state that has no home yet gets one; then they are counted."""
        if self._places is None or self._places != _places(self.optimizer.state):
            self.tally = self.keeper.sweep(self.name, self.state())
            self._places = _places(self.optimizer.state)

    def promote(self) -> int:
        """What came into the pool before the budget was known, and has room in HBM, goes there."""
        self._places = None
        return self.keeper.promote(self.name, (tensor for tensor, _ in self.state()))

    def state(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Every tensor of state, with the parameter it belongs to."""
        for parameter, values in self.optimizer.state.items():
            for _keys, tensor in tensors_in(values):
                yield tensor, parameter if isinstance(parameter, torch.Tensor) else None


def _places(state: Mapping[Any, Any]) -> list[int] | None:
    """The address of each tensor; None where there are others inside wrappers, lists or dicts."""
    places: list[int] = []
    for values in state.values():
        if type(values) is not dict:
            return None
        for value in values.values():
            if type(value) is torch.Tensor:
                places.append(value.data_ptr())
            elif isinstance(value, torch.Tensor | Mapping | list | tuple):
                return None
    return places


class CaughtShadow:
    """The shadow of an EMA: a list of tensors that live in the pool, and stay there through every update."""

    name = "ema"

    def __init__(self, ema: Any, keeper: Keeper) -> None:
        """``ema`` keeps its tensors in ``shadow_params`` and gives them new memory in place, or new tensors."""
        self.ema = ema
        self._keeper = keeper
        self.tally = Tally()

    def sweep(self) -> None:
        """Tensors that are elsewhere, because they were made before the pool or moved since, get their home."""
        self.tally = self._keeper.sweep(self.name, ((tensor, None) for tensor in self.ema.shadow_params))

    @property
    def temporaries(self) -> int:
        """Device memory that an update needs for a moment: with foreach, another copy of everything."""
        return self.tally.bytes if getattr(self.ema, "foreach", False) else 0
