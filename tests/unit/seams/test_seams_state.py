"""Model state at its moments: what is refused and why, what is caught when, what the summary tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import ConfigError, FeatureUnavailable
from simpletuner_gh200.memory.ceilings import device_headroom
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import Capabilities, NullDriver
from simpletuner_gh200.memory.pool.pool import Share
from simpletuner_gh200.model.catching import HostPool
from simpletuner_gh200.seams.features.state.feature import StateFeature
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.units import GIB
from tests.unit.model.momentum import Momentum


class Shadow:
    """As upstream's EMA: a list of clones, moved in place."""

    foreach = True

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self.shadow_params = [weight.detach().clone() for weight in weights]

    def to(self, *args: Any, **kwargs: Any) -> Shadow:
        for tensor in self.shadow_params:
            tensor.data = tensor.data.to(*args, **kwargs)
        return self


def trainer(*, ranks: int = 1, **config: Any) -> SimpleNamespace:
    given = {"optimizer": "torch-adamw", "ema_device": "cpu", **config}
    weights = [torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.ones(4))]
    return SimpleNamespace(
        accelerator=SimpleNamespace(
            device=torch.device("cpu"),
            distributed_type="DistributedType.NO",
            num_processes=ranks,
            load_state=lambda folder, **kwargs: kwargs,
        ),
        config=SimpleNamespace(**given),
        weights=weights,
        optimizer=Momentum(weights, lr=0.1),
        ema_model=None,
    )


def asked(run: Any, **keys: Any) -> StateFeature:
    feature = StateFeature()
    settings = resolve({"gh200_optimizations": {"use_uvm": True, "uvm_min_tensor_kb": 0, **keys}}, {})
    assert feature.request(settings, {}) == "requested"
    feature.runtime = Runtime(Launch())
    feature.runtime.settings = settings
    feature.runtime.trainer = run
    return feature


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with detect.using(NullDriver("a test")):
        yield


def step(run: Any) -> None:
    for weight in run.weights:
        weight.grad = torch.ones_like(weight)
    run.optimizer.step()


def test_it_is_off_unless_asked_for() -> None:
    assert StateFeature().request(resolve({}, {}), {}) == "off"


@pytest.mark.parametrize("key", ["oom_reserve_gb", "uvm_hbm_budget_gb"])
def test_a_key_that_would_reach_nothing_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match="no effect without use_uvm"):
        resolve({"gh200_optimizations": {key: 2}}, {})


def test_a_run_from_start_to_end(no_gpu: None) -> None:
    run = trainer(use_ema=True)
    feature = asked(run)
    feature.start(run)
    assert run.config.ema_device == "accelerator", "or every update would move all shadows"
    with feature.making_ema(run):
        run.ema_model = Shadow(run.weights)
    feature.hooks_ready(run)
    feature.before_train(run)
    assert feature.summary()["of"]["ema"]["bytes"] == 48
    step(run)
    found = feature.summary()
    assert found["of"]["optimizer"]["tensors"] == 4
    assert (found["tensors"], found["bytes"]) == (6, 96 + 48)
    assert found["pool"]["held"] == found["bytes"]
    assert feature.telemetry()["bytes"] == found["bytes"]
    run.ema_model.to(dtype=torch.float64)
    assert feature.summary()["of"]["ema"] == {
        **dict.fromkeys(("hbm_tensors", "hbm_bytes", "small_tensors", "small_bytes"), 0),
        "tensors": 2,
        "bytes": 96,
    }
    feature.after_train(run)
    assert "step" not in vars(run.optimizer), "what was wrapped is as it was"
    feature.close()


def test_shadows_that_are_made_twice_are_held_once(no_gpu: None) -> None:
    run = trainer(use_ema=True)
    feature = asked(run)
    feature.start(run)
    for _ in range(2):
        with feature.making_ema(run):
            run.ema_model = Shadow(run.weights)
    assert feature.summary()["pool"]["held"] == 48


def test_ema_on_the_cpu_only_is_left_alone(no_gpu: None) -> None:
    run = trainer(use_ema=True, ema_cpu_only=True)
    feature = asked(run)
    feature.start(run)
    with feature.making_ema(run):
        run.ema_model = Shadow(run.weights)
    assert run.config.ema_device == "cpu"
    assert "ema" not in feature.summary()["of"]


def test_a_resume_loads_into_the_pool_and_on_the_cpu_first(no_gpu: None) -> None:
    run = trainer(ranks=2)
    feature = asked(run)
    feature.start(run)
    feature.hooks_ready(run)
    assert run.accelerator.load_state("folder") == {"map_location": "cpu"}
    loaded = {weight: {"momentum": torch.zeros_like(weight.data)} for weight in run.weights}
    run.optimizer.load_state_dict(loaded)
    assert feature.summary()["of"]["optimizer"]["bytes"] == 48


def test_streaming_on_request(no_gpu: None) -> None:
    run = trainer()
    feature = asked(run, uvm_streaming="on")
    feature.start(run)
    feature.hooks_ready(run)
    for _ in range(3):
        step(run)
    found = feature.summary()
    assert (found["streaming"], found["streamed_steps"]) == ("streamed through HBM", 2)


def test_without_a_device_nothing_is_streamed_by_itself(no_gpu: None) -> None:
    run = trainer()
    feature = asked(run)
    feature.start(run)
    feature.hooks_ready(run)
    step(run)
    step(run)
    assert feature.summary()["streaming"] == "taken in place: no device was measured"


NONE = Share()


class Counted:
    """Torch's statistics of a device that is not here, and a driver that knows its size."""

    allocated, peak, reserved, total = 30 * GIB, 50 * GIB, 60 * GIB, 96 * GIB

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        return self.total - self.reserved, self.total

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda ordinal: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda ordinal: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda ordinal: self.reserved)


def budget(monkeypatch: pytest.MonkeyPatch, counted: Counted, in_grace: Share = NONE, **config: Any) -> int:
    """What gpu_first gets with the state's pool on the device."""
    run = trainer(**config)
    feature = asked(run)
    with monkeypatch.context() as patching:
        feature.start(run)
        feature.hooks_ready(run)
        feature._budget = None
        counted.install(patching)
        patching.setattr(HostPool, "share", lambda pool: in_grace)
        with detect.using(counted):  # type: ignore[arg-type]
            step(run)
    return int(feature.summary()["hbm_budget"]["bytes"])


def test_gradients_outlive_a_step_unless_they_are_set_to_none(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    gone = budget(monkeypatch, counted, set_grads_to_none=True)
    assert gone == counted.total - counted.peak - device_headroom(counted.total)
    assert budget(monkeypatch, counted, set_grads_to_none=False) == gone - 48
    assert budget(monkeypatch, counted) == gone - 48


def test_an_idle_reserve_is_not_taken_off_what_training_needs(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    plain = budget(monkeypatch, counted)
    counted.reserved += 16 * GIB  # of torch's, and none of the device's
    monkeypatch.setattr(counted, "memory_info", lambda ordinal: (36 * GIB, counted.total))
    assert budget(monkeypatch, counted, Share(reserved=16 * GIB)) == plain
    counted.peak += 4 * GIB
    counted.allocated += 4 * GIB
    assert budget(monkeypatch, counted, Share(reserved=16 * GIB, allocated=4 * GIB)) == plain


@pytest.mark.parametrize(
    ("config", "keys", "reason"),
    [
        ({"optimizer_cpu_offload_method": "torchao"}, {}, "torchao"),
        ({"ramtorch": True}, {}, "RamTorch"),
        ({"optimizer_release_gradients": True}, {}, "inside the backward pass"),
        ({"optimizer": "optimi-adamw"}, {"uvm_streaming": "on"}, "counts step over all parameters"),
        ({"optimizer": "my-own"}, {"uvm_streaming": "on"}, "not in the table"),
    ],
)
def test_refused_with_the_reason(no_gpu: None, config: dict[str, Any], keys: dict[str, Any], reason: str) -> None:
    run = trainer(**config)
    with pytest.raises(FeatureUnavailable, match=reason):
        asked(run, **keys).start(run)


def test_deepspeed_is_refused(no_gpu: None) -> None:
    run = trainer()
    run.accelerator.distributed_type = "DistributedType.DEEPSPEED"
    with pytest.raises(FeatureUnavailable, match="DeepSpeed"):
        asked(run).start(run)


def test_a_gpu_that_is_not_nvidias_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run = trainer()
    with (
        detect.using(NullDriver("this torch is built for AMD (HIP 6.4); everything CUDA stays off")),
        pytest.raises(FeatureUnavailable, match="AMD"),
    ):
        asked(run).start(run)


class Device:
    """Capabilities of a device, at the hardware boundary."""

    name = "cuda"
    home = 0

    def __init__(self, **facts: Any) -> None:
        self._facts = facts

    def capabilities(self, ordinal: int) -> Capabilities:
        return replace(NullDriver().capabilities(ordinal), device_total=1 << 30, **self._facts)


@pytest.mark.parametrize(
    ("device", "keys", "reason"),
    [
        (Device(mode="single pool", integrated=True), {"uvm_access_pattern": "cpu_first"}, "one physical pool"),
        (Device(mode="discrete", maps_host_memory=True), {}, "behind PCIe"),
        (Device(mode="discrete"), {"uvm_access_pattern": "cpu_first"}, "can't map host memory"),
    ],
)
def test_a_device_that_cannot_is_refused_with_the_reason(device: Any, keys: dict[str, Any], reason: str) -> None:
    run = trainer()
    with detect.using(device), pytest.raises(FeatureUnavailable, match=reason) as refused:
        asked(run, **keys).start(run)
    assert "use_uvm" in str(refused.value)


def test_scope_all_is_refused_with_the_remedy(no_gpu: None) -> None:
    with pytest.raises(FeatureUnavailable, match=r"(?s)uvm_scope 'all' is not offered.*set uvm_scope to 'optimizer'"):
        asked(trainer(), uvm_scope="all").start(trainer())
