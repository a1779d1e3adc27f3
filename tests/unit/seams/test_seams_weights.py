"""Weights and gradients as features: by name they stop the run where they can't work, auto is off with the reason."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import ConfigError, FeatureUnavailable
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.memory.pool.pool import Share
from simpletuner_gh200.seams.feature import Feature
from simpletuner_gh200.seams.features import weights
from simpletuner_gh200.seams.features.gradients import GradientsFeature
from simpletuner_gh200.seams.features.weights import WeightsFeature
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.upstream.features import ON


def runtime_with(*features: Feature, **block: Any) -> Runtime:
    runtime = Runtime(Launch())
    runtime.features = features or (GradientsFeature(), WeightsFeature())
    runtime.trainer = trainer_with()
    for feature in runtime.features:
        feature.runtime = runtime
    for seam in runtime.seams.values():
        seam.status = ON
    runtime.configure(resolve({"gh200_optimizations": block}, {}))
    return runtime


def trainer_with(model: nn.Module | None = None, **config: Any) -> Any:
    accelerator = SimpleNamespace(device=torch.device("cpu"), distributed_type="NO", num_processes=1, backward=None)
    held = SimpleNamespace(model=model if model is not None else nn.Linear(2, 2))
    return SimpleNamespace(accelerator=accelerator, config=SimpleNamespace(**config), model=held)


@pytest.mark.parametrize("key", ["weights", "gradients"])
def test_by_name_it_is_refused_and_auto_is_off(key: str) -> None:
    with pytest.raises(FeatureUnavailable, match=f"{key} = 'grace' can't work here.*ramtorch = True"):
        runtime_with(**{key: "grace"}).call("start", trainer_with(ramtorch=True))
    runtime = runtime_with(**{key: "auto"})
    runtime.call("start", trainer_with())
    assert "no GPU" in str(runtime.statuses[key])
    assert not runtime.features_on


def test_a_model_without_a_block_that_may_leave_is_refused() -> None:
    runtime = runtime_with(weights="grace")
    with detect.using(NullDriver("a test")):
        runtime.call("start", trainer_with())
        with pytest.raises(FeatureUnavailable, match="no block of the model"):
            runtime.call("hooks_ready", trainer_with())


class Wrapped(torch.Tensor):
    """As quantised weights are that keep their bytes inside."""


def test_blocks_that_are_mostly_quantised_are_refused() -> None:
    model = nn.ModuleList(nn.ModuleDict({"one": nn.Linear(8, 8)}) for _ in range(3))
    for block in model:
        block["one"].weight = nn.Parameter(torch.randn(8, 8).as_subclass(Wrapped))
    runtime = runtime_with(weights="grace", uvm_min_tensor_kb=0)
    with detect.using(NullDriver("a test")):
        runtime.call("start", trainer_with(nn.ModuleDict({"blocks": model})))
        with pytest.raises(FeatureUnavailable, match="quantised, and in Wrapped"):
            runtime.call("hooks_ready", trainer_with(nn.ModuleDict({"blocks": model})))


def test_gradients_of_a_backward_pass_that_fails_are_at_home_as_well() -> None:
    runtime, trainer, settled = runtime_with(gradients="grace"), trainer_with(), []
    gradients = next(one for one in runtime.features if isinstance(one, GradientsFeature))
    gradients._pooled = SimpleNamespace(settle=lambda: settled.append(True))  # type: ignore[assignment]
    trainer.accelerator.backward = partial(next, iter(()))
    gradients.hooks_ready(trainer)
    with pytest.raises(StopIteration):
        trainer.accelerator.backward()
    assert settled == [True]


@pytest.mark.parametrize("steps", [0, 1])
def test_state_that_is_there_is_counted_once(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([weight])
    for _ in range(steps):
        weight.sum().backward()
        optimizer.step()
    for counted, size in (("memory_allocated", 5000), ("max_memory_allocated", 9000), ("memory_reserved", 9000)):
        monkeypatch.setattr(torch.cuda, counted, lambda _ordinal, size=size: size)
    monkeypatch.setattr(weights, "automatic_budget", lambda **given: given)
    runtime = runtime_with()
    runtime.trainer.optimizer = optimizer
    runtime.grace.pool = SimpleNamespace(ordinal=0, share=Share)  # type: ignore[assignment]
    room: Any
    with detect.using(NullDriver("a test")):
        monkeypatch.setattr(NullDriver, "memory_info", lambda _driver, _ordinal: (1000, 20000))
        room = weights.room_left(runtime)
    born = 0 if steps else 8000
    assert (room["peak"], room["at_step"]) == (9000 + born, 9000 + born)


def test_a_budget_of_nothing_is_said() -> None:
    with pytest.raises(ConfigError, match=r"weights_hbm_budget_gb.*no effect"):
        resolve({"gh200_optimizations": {"weights_hbm_budget_gb": 3}}, {})
