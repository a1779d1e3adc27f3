"""Activations in Grace at their moments: when they are refused, what is wrapped, what ``auto`` keeps, what is said."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import ConfigError, FeatureUnavailable
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.model.refusals import activations_device_refusal, activations_refusal
from simpletuner_gh200.seams.features.activations.batch import shape_of, weights_of
from simpletuner_gh200.seams.features.activations.feature import ActivationsFeature
from simpletuner_gh200.seams.points.trainer import SEAMS
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.upstream.features import ON
from tests.unit.model.saving import FixedRoom, same

CPU = NullDriver("a test").capabilities(0)
GPU = replace(CPU, mode="numa", name="a GPU")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"gradient_checkpointing_backend": "unsloth-ffn"}, "gradient_checkpointing_backend"),
        ({"gradient_checkpointing_offload_attention": True}, "SimpleTuner's own offloading"),
        ({"dynamo_backend": "inductor"}, "dynamo_backend = 'inductor'"),
        ({"ramtorch": True}, "RamTorch"),
        ({"musubi_blocks_to_swap": 4}, "musubi_blocks_to_swap = 4"),
        ({"enable_group_offload": True}, "enable_group_offload"),
    ],
)
def test_what_was_not_tested_together_is_refused_with_the_reason(config: dict[str, Any], named: str) -> None:
    assert named in str(activations_refusal(config))


@pytest.mark.parametrize(
    "config",
    [{}, {"dynamo_backend": None}, {"dynamo_backend": "no"}, {"dynamo_backend": "DynamoBackend.NO", "ramtorch": False}],
)
def test_an_ordinary_run_is_not(config: dict[str, Any]) -> None:
    plain = {"gradient_checkpointing_backend": "torch", "musubi_blocks_to_swap": 0, **config}
    assert activations_refusal(plain, "DistributedType.MULTI_GPU") is None


@pytest.mark.parametrize("distributed", ["DistributedType.FSDP", "DistributedType.DEEPSPEED"])
def test_engines_that_move_weights_are_refused(distributed: str) -> None:
    assert distributed.rpartition(".")[2] in str(activations_refusal({}, distributed))


def test_devices() -> None:
    assert activations_device_refusal("cpu", CPU) is None
    assert activations_device_refusal("cuda", GPU) is None
    assert "a test" in str(activations_device_refusal("cuda", CPU)), "a device without a driver of ours"
    assert "'mps'" in str(activations_device_refusal("mps", CPU))
    assert "one memory" in str(activations_device_refusal("cuda", replace(GPU, integrated=True)))


@pytest.mark.parametrize("block", [{"activations": "on"}, {"activation_limit_gb": 0}, {"activation_min_tensor_kb": -1}])
def test_bad_values_are_named(block: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(block))):
        resolve({"gh200_optimizations": block}, {})


# -- in a run ---------------------------------------------------------------------------------------------


class Trainer:
    """As far as the feature looks at SimpleTuner's."""

    def __init__(self, **config: Any) -> None:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        self.config = SimpleNamespace(gradient_checkpointing=False, **config)
        self.model = SimpleNamespace(model=net)
        self.accelerator = SimpleNamespace(device=torch.device("cpu"), distributed_type="NO")
        self.optimizer = SimpleNamespace(param_groups=[{"params": list(net.parameters())}])

    def model_predict(self, prepared_batch: dict[str, Any], custom_timesteps: Any = None) -> torch.Tensor:
        x = prepared_batch["noisy_latents"]
        if self.config.gradient_checkpointing:
            return torch.utils.checkpoint.checkpoint(self.model.model, x, use_reentrant=True)
        return self.model.model(x)


BATCH = {"noisy_latents": torch.linspace(0, 1, 32).reshape(4, 8), "added": {"time_ids": torch.ones(4, 6)}, "n": 3}


class Run:
    """One feature, on, at the seam that tells it when the model predicts."""

    def __init__(self, trainer: Trainer, **block: Any) -> None:
        self.trainer = trainer
        self.runtime = Runtime(Launch())
        self.feature = ActivationsFeature()
        self.feature.runtime = self.runtime
        self.runtime.features = (self.feature,)
        for seam in self.runtime.seams.values():
            seam.status = ON
        self.runtime.configure(resolve({"gh200_optimizations": {"activation_min_tensor_kb": 0, **block}}, {}))
        module = ModuleType("trainer")
        module.Trainer, module.torch = Trainer, torch  # type: ignore[attr-defined]
        (seam,) = (seam for seam in SEAMS if seam.name == "trainer.model_predict")
        (self.patch,) = seam.patches(module, self.runtime)

    def __enter__(self) -> Run:
        self.patch.install()
        self.runtime.call("start", self.trainer)
        self.runtime.call("before_train", self.trainer)
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.unwind("after_train", self.trainer)
        self.patch.uninstall()
        self.runtime.close()

    def step(self, batch: dict[str, Any] = BATCH) -> list[torch.Tensor]:
        return gradients(self.trainer, batch)


def gradients(trainer: Trainer, batch: dict[str, Any] = BATCH) -> list[torch.Tensor]:
    weights = list(trainer.model.model.parameters())
    for weight in weights:
        weight.grad = None
    trainer.model_predict(prepared_batch=batch).square().sum().backward()
    return [weight.grad for weight in weights if weight.grad is not None]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny tensors need no threads, and checkpointing no compiler, which its wrapper would import."""
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", inspect.unwrap(torch.utils.checkpoint.checkpoint))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def driver() -> Iterator[NullDriver]:
    with detect.using(NullDriver("a test")) as null:
        assert isinstance(null, NullDriver)
        yield null


def test_it_moves_and_changes_nothing() -> None:
    trainer = Trainer()
    plain = gradients(trainer)
    with Run(trainer, activations="grace") as run:
        for _ in range(3):
            assert same(run.step(), plain)
        told = run.feature.telemetry()
        assert told["moved_bytes"] > 0
        assert told["held_bytes"] > 0
    summary = run.runtime.summary()["details"]["activations"]
    assert summary["tensors"] > summary["shared"]
    assert summary["saved"] >= summary["moved"] > 0
    assert summary["chosen"] == "in CPU memory, standing in for Grace, as asked"
    assert [shape["shape"] for shape in summary["shapes"]] == ["4x8"]


def test_predictions_without_gradients_are_left_alone() -> None:
    with Run(Trainer(), activations="grace") as run:
        with torch.no_grad():
            run.trainer.model_predict(BATCH)
        assert run.feature.summary()["tensors"] == 0
        assert run.feature._engine is not None and run.feature._engine.shapes == {}


def test_checkpointing_is_past_in_a_step_and_put_back_after_the_run(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    plain = gradients(trainer)
    original = torch.utils.checkpoint.checkpoint
    trainer.config.gradient_checkpointing = True
    batch = {**BATCH, "noisy_latents": BATCH["noisy_latents"].clone().requires_grad_()}
    with caplog.at_level(logging.INFO), Run(trainer, activations="grace") as run:
        for _ in range(2):
            assert same(run.step(batch), plain)
        (shape,) = run.feature.summary()["shapes"]
        assert shape["blocks"] == {"keep": 0, "offload": 1, "recompute": 0}
    assert torch.utils.checkpoint.checkpoint is original
    assert "switched off for each block" in caplog.text
    assert "of 1 checkpointed blocks" in caplog.text


def test_by_name_it_is_refused_and_auto_is_off_with_the_reason() -> None:
    with (
        pytest.raises(FeatureUnavailable, match="ramtorch = True") as refused,
        Run(Trainer(ramtorch=True), activations="grace"),
    ):
        pass
    assert refused.value.exit_code == 2
    with Run(Trainer(), activations="auto") as run:
        run.step()
    assert "no GPU" in str(run.runtime.statuses["activations"])
    assert "a test" in str(run.runtime.statuses["activations"])


@pytest.mark.parametrize(("slower", "way"), [("with", "are left to SimpleTuner"), ("without", "are moved to Grace")])
def test_auto_keeps_what_is_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, slower: str, way: str
) -> None:
    """With made-up times: a step takes a second, the slower way two."""
    trainer = Trainer()
    plain = gradients(trainer)
    trainer.config.gradient_checkpointing = True
    trainer.model.model.requires_grad_(True)
    monkeypatch.setattr(ActivationsFeature, "_against", lambda self, trainer: None)
    now = [0.0]
    monkeypatch.setattr("simpletuner_gh200.seams.features.activations.feature.time.perf_counter", lambda: now[0])
    batch = {**BATCH, "noisy_latents": BATCH["noisy_latents"].clone().requires_grad_()}
    with caplog.at_level(logging.INFO), Run(trainer, activations="auto") as run:
        for _ in range(40):
            before = run.feature.summary()["tensors"]
            assert same(run.step(batch), plain)
            went = "with" if run.feature.summary()["tensors"] > before else "without"
            now[0] += 2.0 if went == slower else 1.0
        summary = run.feature.summary()
    assert summary["chosen"].startswith(way)
    assert summary["gain"] == (-1.0 if slower == "with" else 0.5)
    assert went != slower
    assert f"activations {way}" in caplog.text


def test_auto_without_checkpointing_decides_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other shapes did and however long ago: plain only where this shape is known to fit as it is."""
    small, large = BATCH, {**BATCH, "noisy_latents": torch.ones(64, 8)}
    monkeypatch.setattr(ActivationsFeature, "_against", lambda self, trainer: None)
    trainer = Trainer()
    plain = gradients(trainer, large)
    with Run(trainer, activations="auto") as run:
        engine = run.feature._engine
        assert engine is not None
        engine._room = hbm = FixedRoom(2048)

        def moved(batch: dict[str, Any]) -> int:
            before = engine.moved
            run.step(batch)
            return engine.moved - before

        assert moved(small) > 0, "unknown: measured first"
        assert [moved(small) for _ in range(80)] == [0] * 80
        tensors = engine.tensors
        moved(small)
        assert engine.tensors == tensors, "left as SimpleTuner has it"
        assert all(moved(large) > 0 for _ in range(20))
        assert same(run.step(large), plain)
        assert moved(small) == 0
        chosen = "moved to Grace for 1 of 2 shapes of batches: steps of the others fit into HBM"
        assert run.feature.summary()["chosen"] == chosen
        hbm.size = 0
        assert moved(small) > 0, "there was room for it, and there is no more"


def test_auto_compares_no_step_of_the_optimizer_with_one_that_accumulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of six, and turns of three: every other way would get all of the optimizer's steps."""
    trainer = Trainer()
    trainer.config.gradient_checkpointing = True
    monkeypatch.setattr(ActivationsFeature, "_against", lambda self, trainer: None)
    now = [0.0]
    monkeypatch.setattr("simpletuner_gh200.seams.features.activations.feature.time.perf_counter", lambda: now[0])
    batch = {**BATCH, "noisy_latents": BATCH["noisy_latents"].clone().requires_grad_()}
    with Run(trainer, activations="auto") as run:
        for step in range(60):
            trainer.accelerator.sync_gradients = step % 6 == 5
            before = run.feature.summary()["tensors"]
            run.step(batch)
            moved = run.feature.summary()["tensors"] > before
            now[0] += (1.25 if moved else 1.0) + 10 * trainer.accelerator.sync_gradients
        assert run.feature.summary()["gain"] == -0.25


def test_checkpointing_is_past_what_stands_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SimpleTuner 3 puts a function of its own in place for ``gradient_checkpointing_interval``."""
    original = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda function, *a, **k: original(function, *a, **k))
    trainer = Trainer()
    plain = gradients(trainer)
    trainer.config.gradient_checkpointing = True
    batch = {**BATCH, "noisy_latents": BATCH["noisy_latents"].clone().requires_grad_()}
    with Run(trainer, activations="grace") as run:
        assert same(run.step(batch), plain)
        assert run.feature.summary()["moved"] > 0


def test_captions_of_nearly_the_same_length_are_one_shape() -> None:
    def shape(tokens: int, latents: int = 64) -> object:
        picture = {"latents": torch.ones(1, 4, latents, 64), "noise": torch.ones(1, latents, 8)}
        return shape_of({**picture, "prompt_embeds": torch.ones(1, tokens, 8), "masks": torch.ones(1, tokens)})

    assert shape(129) == shape(140) == shape(144)
    assert shape(144) != shape(145)
    assert len({shape(tokens) for tokens in range(17, 1025)}) == 6 * 8
    assert shape(129, 64) != shape(129, 63), "pictures are taken as they are"


def test_shapes_and_weights() -> None:
    other = {**BATCH, "noisy_latents": torch.ones(2, 8)}
    assert shape_of(BATCH) == shape_of({**BATCH, "n": 9})
    assert shape_of(BATCH) != shape_of(other)
    assert str(shape_of(other)) == "2x8"
    trainer = Trainer()
    trainer.model.extra = [torch.nn.BatchNorm1d(3), None]
    assert len(list(weights_of(trainer, trainer.model))) == 4 + 2 + 3
