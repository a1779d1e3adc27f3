"""State caught as it is stored: every way of storing, what is left alone, what is swept up, what it costs."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simpletuner_gh200.model.catching import CaughtOptimizer, HostPool, Keeper
from simpletuner_gh200.model.placement import Placement
from simpletuner_gh200.model.tensors import owns_its_storage, plain_tensors
from tests.unit.model.momentum import Momentum

Way = Callable[[dict[Any, Any], torch.nn.Parameter], None]


def by_ior(state: dict[Any, Any], weight: torch.nn.Parameter) -> None:
    entry = state[weight]
    entry |= {"a": torch.zeros(8)}


def aliased(state: dict[Any, Any], weight: torch.nn.Parameter) -> None:
    own = state[weight]["a"] = torch.zeros(8)
    own.fill_(3)


WAYS: dict[str, Way] = {
    "setitem": lambda state, weight: state[weight].__setitem__("a", torch.zeros(8)),
    "setdefault": lambda state, weight: state[weight].setdefault("a", torch.zeros(8)),
    "update": lambda state, weight: state[weight].update(a=torch.zeros(8)),
    "ior": by_ior,
    "whole dict": lambda state, weight: state.__setitem__(weight, {"a": torch.zeros(8)}),
    "outer setdefault": lambda state, weight: state.setdefault(weight, {"a": torch.zeros(8)}),
    "in a list": lambda state, weight: state[weight].__setitem__("a", [torch.zeros(8)]),
    "appended later": lambda state, weight: state[weight].setdefault("a", []).append(torch.zeros(8)),
    "aliased": aliased,
}


class Stores:
    """Stores state in one way, and nothing else."""

    def __init__(self, way: Way) -> None:
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.weight.grad = torch.ones(8)
        self.param_groups = [{"params": [self.weight]}]
        self.state: dict[Any, Any] = Momentum([], 0).state
        self._way = way

    def step(self) -> None:
        self._way(self.state, self.weight)


def caught(optimizer: Any, **placement: Any) -> CaughtOptimizer:
    return CaughtOptimizer(
        optimizer, Keeper(HostPool(1 << 20), Placement(**{"pattern": "cpu_first", "smallest": 0} | placement))
    )


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_storing_ends_in_the_pool_and_in_plain_dicts(way: str) -> None:
    optimizer = Stores(WAYS[way])
    plain = optimizer.state
    keeper = caught(optimizer)
    keeper.step(optimizer.step)
    assert optimizer.state is plain
    assert type(optimizer.state[optimizer.weight]) is dict
    assert keeper.tally.tensors == 1
    assert keeper.tally.bytes == 32
    if way == "aliased":
        assert optimizer.state[optimizer.weight]["a"].eq(3).all(), "a variable of the optimizer's own goes along"
    pickle.dumps(list(optimizer.state.values()))


def test_no_random_number_is_consumed() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    optimizer = Momentum([weight], lr=0.1)
    caught(optimizer).step(optimizer.step)
    assert torch.rand(3).equal(expected)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda weight: torch.tensor(1.0), "a counter"),
        (lambda weight: torch.zeros(3), "too small"),
        (lambda weight: weight.data, "the weight itself"),
        (lambda weight: weight.grad.view(2, 4), "a view of the gradient"),
        (lambda weight: torch.zeros(64)[8:16], "part of something larger"),
        (lambda weight: torch.zeros(1).expand(8), "the same byte eight times"),
    ],
)
def test_what_is_left_alone(value: Callable[[torch.nn.Parameter], torch.Tensor], why: str) -> None:
    optimizer = Stores(lambda state, weight: state[weight].__setitem__("a", value(weight)))
    keeper = caught(optimizer, smallest=16)
    keeper.step(optimizer.step)
    assert (keeper.tally.tensors, keeper.tally.small_tensors) == (0, 1), why


def test_a_gradient_that_was_assigned_during_the_step_is_not_taken_for_state() -> None:
    """As bitsandbytes does: what shares its storage is asked when it is stored."""

    def reassigns(state: dict[Any, Any], weight: torch.nn.Parameter) -> None:
        weight.grad = torch.zeros(8)
        state[weight]["a"] = weight.grad

    optimizer = Stores(reassigns)
    keeper = caught(optimizer)
    keeper.step(optimizer.step)
    assert keeper.tally.tensors == 0


def test_the_budget_is_shared_counted_once_and_given_back() -> None:
    weights = [torch.nn.Parameter(torch.ones(10)) for _ in range(4)]
    keeper = Keeper(HostPool(1 << 20), Placement("gpu_first", 0, budget=200))
    first, second = (
        CaughtOptimizer(Momentum(pair, lr=0.1), keeper, name) for name, pair in (("a", weights[:2]), ("b", weights[2:]))
    )
    for weight in weights:
        weight.grad = torch.ones(10)
    for _ in range(3):
        for one in (first, second):
            one.step(one.optimizer.step)
    assert (first.tally.hbm_tensors, first.tally.tensors) == (4, 0)
    assert (second.tally.hbm_tensors, second.tally.tensors) == (1, 3)
    assert keeper.in_hbm == 200
    first.optimizer.state.clear()
    first.sweep()
    assert keeper.in_hbm == 40
    assert second.promote() == 120
    second.sweep()
    assert (second.tally.hbm_tensors, second.tally.tensors, keeper.in_hbm) == (4, 0, 160)


def test_a_failing_step_leaves_plain_dicts_and_what_was_stored() -> None:
    def fails(state: dict[Any, Any], weight: torch.nn.Parameter) -> None:
        state[weight]["a"] = torch.zeros(8)
        raise ValueError("in the middle")

    optimizer = Stores(fails)
    keeper = caught(optimizer)
    with pytest.raises(ValueError, match="in the middle"):
        keeper.step(optimizer.step)
    assert type(optimizer.state[optimizer.weight]) is dict
    keeper.sweep()
    assert keeper.tally.tensors == 1


def test_state_that_is_replaced_is_swept_up_and_the_old_is_given_back() -> None:
    optimizer = Stores(lambda state, weight: state[weight].__setitem__("a", torch.zeros(8)))
    keeper = caught(optimizer)
    pool = keeper.keeper.pool
    assert isinstance(pool, HostPool)
    gc.disable()  # a cycle would keep it
    try:
        for _ in range(3):
            keeper.step(optimizer.step)
    finally:
        gc.enable()
    assert pool.state().held == pool.state().peak == 32


def test_beyond_the_limit_torchs_error_carries_the_explanation() -> None:
    optimizer = Momentum([torch.nn.Parameter(torch.ones(100))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(100)
    keeper = CaughtOptimizer(optimizer, Keeper(HostPool(600, "all that is left"), Placement("cpu_first", 0)))
    with pytest.raises(torch.OutOfMemoryError, match=r"does not fit into Grace.*all that is left"):
        keeper.step(optimizer.step)


class Wrapper(torch.Tensor):
    """A wrapper subclass as quantised states and DTensors are: its bytes are in the tensors inside."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} on the wrapper itself")


def test_what_lives_is_counted_although_pythons_view_of_its_storage_was_collected() -> None:
    """Collecting a cycle ends a finalizer on the view; torch hands out the same storage again."""
    pool = HostPool(1 << 20)
    kept = pool.take(torch.zeros(64))
    cycle: list[Any] = [kept.untyped_storage()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.holds(kept)
    assert pool.state().held == 256
    del kept
    assert pool.state().held == 0


def test_wrappers_are_looked_at_through_their_inner_tensors() -> None:
    held = Wrapper(torch.ones(8, 8, dtype=torch.uint8), torch.ones(8))
    optimizer = Stores(lambda state, weight: state[weight].__setitem__("a", held))
    keeper = caught(optimizer, smallest=8)
    keeper.step(optimizer.step)
    assert (keeper.tally.tensors, keeper.tally.bytes) == (2, 64 + 32)
    assert all(keeper.keeper.pool.holds(part) for part in plain_tensors(held))
    assert held.codes.eq(1).all()


@pytest.mark.parametrize(
    ("tensor", "whole"),
    [
        (torch.zeros(4, 5), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(4, 5).t(), True),
        (torch.zeros(4, 1, 5), True),
        (torch.zeros(4, 5)[:, :3], False),
        (torch.zeros(4, 5)[1:], False),
        (torch.zeros(5).expand(4, 5), False),
    ],
)
def test_only_whole_storages_move(tensor: torch.Tensor, whole: bool) -> None:
    assert owns_its_storage(tensor) == whole


class Loads(Momentum):
    """As torch's own optimizers: what has the type and the device of its parameter is taken as it is."""

    def load_state_dict(self, loaded: dict[Any, Any]) -> None:
        weights = self.param_groups[0]["params"]
        self.state = {weights[number]: dict(values) for number, values in loaded["state"].items()}


def test_what_is_loaded_is_at_home_before_the_optimizer_has_it() -> None:
    weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = Loads(weights, lr=0.1)
    keeper = caught(optimizer, smallest=16)
    seen: list[bool] = []

    def load(loaded: dict[Any, Any]) -> None:
        seen.extend(keeper.keeper.pool.holds(values["momentum"]) for values in loaded["state"].values())
        optimizer.load_state_dict(loaded)

    state = {number: {"momentum": torch.full((8,), float(number)), "step": torch.tensor(3.0)} for number in range(2)}
    keeper.load(load, {"state": state, "param_groups": [{"params": [0, 1]}]})
    assert seen == [True, True]
    assert (keeper.tally.tensors, keeper.tally.small_tensors) == (2, 2)
    assert [optimizer.state[weight]["momentum"].unique().tolist() for weight in weights] == [[0.0], [1.0]]


@pytest.mark.parametrize(("replaced", "sweeps"), [(False, 1), (True, 4)])
def test_a_sweep_looks_again_only_where_something_was_replaced(
    monkeypatch: pytest.MonkeyPatch, replaced: bool, sweeps: int
) -> None:
    def store(state: dict[Any, Any], weight: torch.nn.Parameter) -> None:
        if replaced or not state[weight]:
            state[weight]["a"] = torch.zeros(8)

    optimizer = Stores(store)
    keeper = caught(optimizer)
    swept: list[str] = []
    sweep = keeper.keeper.sweep
    monkeypatch.setattr(keeper.keeper, "sweep", lambda *given: swept.append(given[0]) or sweep(*given))
    for _ in range(4):
        keeper.step(optimizer.step)
        assert keeper.tally.tensors == 1
    assert len(swept) == sweeps
