"""Oversubscription: when it is refused, how its allocator is built, and whose allocations go there."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from simpletuner_gh200.memory.driver.interface import Capabilities
from simpletuner_gh200.memory.driver.null import NullDriver
from simpletuner_gh200.memory.pool.pool import RecordingPool, pool_refusal
from simpletuner_gh200.seams.features.oversubscription.optimizer import PooledOptimizer

ABLE = replace(NullDriver().capabilities(0), managed=True, concurrent_managed=True, mode="numa")


@pytest.mark.parametrize(
    ("version", "conf", "caps", "deepspeed", "reason"),
    [
        ("2.7.1+cu128", "", ABLE, False, "2.8 is the first"),
        ("2.9.1+cu128", "expandable_segments:True", ABLE, False, "expandable_segments"),
        ("2.9.1+cu128", "expandable_segments:False", ABLE, False, None),
        ("2.14.1+cu130", "expandable_segments:True", ABLE, False, None),
        ("2.14.1+cu130", "", ABLE, True, "DeepSpeed"),
        ("2.14.1+cu130", "", replace(ABLE, managed=False), False, "no managed memory"),
        ("2.14.1+cu130", "", replace(ABLE, concurrent_managed=False), False, "at the same time"),
        ("2.8.0", "", ABLE, False, None),
        ("from git", "", ABLE, False, "can't be read"),
    ],
)
def test_refusals(version: str, conf: str, caps: Capabilities, deepspeed: bool, reason: str | None) -> None:
    found = pool_refusal(version, conf, caps, deepspeed=deepspeed)
    assert (found is None) if reason is None else (found is not None and reason in found)


class Momentum:
    """An optimizer in the shape of torch's, without the seconds that torch's own takes to import its compiler."""

    def __init__(self, weights: list[torch.nn.Parameter], lr: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": weights, "lr": lr}]
        self.state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state.setdefault(weight, {})
                    state.setdefault("momentum", torch.zeros_like(weight)).add_(weight.grad)
                    state.setdefault("square", torch.zeros_like(weight)).add_(weight.grad**2)
                    weight.sub_(group["lr"] * state["momentum"])

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None


def steps(count: int) -> tuple[NullDriver, list[int], Momentum, PooledOptimizer]:
    driver = NullDriver("a test")
    pool = RecordingPool(driver, limit=0, pattern="gpu_first")
    weights = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2))]
    optimizer = Momentum(weights, lr=0.1)
    born: list[int] = []
    pooled = PooledOptimizer(optimizer, pool, lambda tensors: born.append(len(tensors)))
    pooled.install()
    for index in range(count):
        (weights[0].sum() if index == 0 else weights[0].sum() + weights[1].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return driver, born, optimizer, pooled


def test_only_steps_that_make_state_run_in_the_pool() -> None:
    driver, born, _, _ = steps(5)
    assert driver.counts["pool_enter"] == driver.counts["pool_leave"] == 2
    assert born == [2, 2], "both tensors of each parameter, when it first has a gradient"


def test_a_failing_step_leaves_the_pool() -> None:
    driver, _, optimizer, _ = steps(1)
    optimizer.param_groups[0]["lr"] = "broken"
    optimizer.param_groups[0]["params"][1].grad = torch.ones(2)
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    assert driver.counts["pool_enter"] == driver.counts["pool_leave"]


def test_uninstall_restores_or_steps_aside() -> None:
    driver, _, optimizer, pooled = steps(1)
    ours = optimizer.step
    optimizer.step = lambda *args: ours(*args)  # type: ignore[method-assign]
    theirs = optimizer.step
    pooled.uninstall()
    assert optimizer.step is theirs
    entered = driver.counts["pool_enter"]
    optimizer.param_groups[0]["params"][1].grad = torch.ones(2)
    optimizer.step()
    assert driver.counts["pool_enter"] == entered


def test_plain_uninstall() -> None:
    _, _, optimizer, pooled = steps(1)
    pooled.uninstall()
    assert getattr(optimizer.step, "__self__", None) is not pooled
