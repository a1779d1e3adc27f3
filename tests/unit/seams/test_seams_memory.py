"""``memory: "auto"`` in a rank: a rehearsal leaves nothing behind, and what is lacking moves the next thing."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.ceilings import Allowance
from simpletuner_gh200.seams.decided import ORIGIN
from simpletuner_gh200.seams.features import memory


class Trainer:
    """One linear layer behind one that counts, with noise of its own, and a weight that a second optimizer trains."""

    def __init__(self, *, fails: list[str]) -> None:
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        self.aside = torch.nn.Parameter(torch.ones(4))
        self.fails, self.drawn = fails, []
        self.failure: Exception = torch.OutOfMemoryError("planted")
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.config = SimpleNamespace()
        self.model = SimpleNamespace(model=self.net, loss=self._loss)
        self.optimizer = SimpleNamespace(param_groups=[{"params": list(self.net[1].parameters())}])
        self.sidecar_optimizer = SimpleNamespace(param_groups=[{"params": [self.aside]}])
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            sync_gradients=True,
            no_sync=lambda _model: nullcontext(),
            backward=self._backward,
        )

    def _full(self, where: str) -> None:
        if self.fails and self.fails[0] == where:
            self.fails.pop(0)
            raise type(self.failure)(*self.failure.args)

    def model_predict(self, prepared_batch: Any) -> torch.Tensor:
        self.drawn.append((random.random(), numpy.random.rand(), float(torch.rand(1))))
        self._full("forward")
        prediction = self.model.model(prepared_batch["latents"]) * self.aside
        self.made.append(weakref.ref(prediction))
        return prediction

    def _loss(self, *, prepared_batch: Any, model_output: torch.Tensor, apply_conditioning_mask: bool) -> torch.Tensor:
        return model_output.square().sum()

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._full("backward")


class Rank:
    """What the feature asks of a runtime."""

    def __init__(self, **given: Any) -> None:
        self.settings = resolve({"gh200_optimizations": {"memory": "auto", **given}}, {})
        self.decision = {"then": ["state", "gradients", "weights", "activations"]}
        self.on: list[str] = []
        self.grace = SimpleNamespace(refusal=lambda trainer, by_name: None, open=lambda trainer: None)

    def feature_on(self, name: str) -> bool:
        return name in self.on

    def switch_on(self, name: str, values: Any, origin: str) -> bool:
        assert origin == ORIGIN
        self.on.append(name)
        return True


def feature_of(rank: Rank, trainer: Trainer) -> memory.MemoryFeature:
    feature = memory.MemoryFeature()
    feature.runtime = rank  # type: ignore[assignment]
    feature.before_train(trainer)
    return feature


def batch(rows: int = 2) -> dict[str, Any]:
    return {"latents": torch.arange(4.0 * rows).view(rows, 4)}


def prepare(feature: memory.MemoryFeature, trainer: Trainer, rows: int = 2) -> None:
    feature.turn_began()
    feature.batch_prepared(trainer, batch(rows))


@pytest.mark.parametrize("fails", [[], ["forward"], ["backward"], ["backward", "forward", "backward"]], ids=str)
@pytest.mark.parametrize("zeros", [False, True])
def test_a_rehearsal_leaves_gradients_statistics_and_random_numbers_as_they_were(fails: list[str], zeros: bool) -> None:
    trainer, rank = Trainer(fails=list(fails)), Rank()
    weights = [*trainer.net.parameters(), trainer.aside]
    statistics = [buffer.clone() for buffer in trainer.net.buffers()]
    for weight in weights if zeros else ():
        weight.grad = torch.zeros_like(weight)
    state = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    feature = feature_of(rank, trainer)
    prepare(feature, trainer)
    assert rank.on == rank.decision["then"][: len(fails)]
    assert feature.telemetry() == {"moved": len(fails), "rehearsals": len(fails) + 1}
    assert len(set(trainer.drawn)) == 1, "each attempt draws the same"
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == state[:2]
    assert torch.equal(torch.get_rng_state(), state[2])
    assert all(map(torch.equal, trainer.net.buffers(), statistics))
    for weight in weights:
        assert (weight.grad is not None and not weight.grad.any()) if zeros else weight.grad is None


def test_only_a_larger_batch_at_the_start_of_a_window_is_rehearsed() -> None:
    trainer, rank = Trainer(fails=[]), Rank()
    feature = feature_of(rank, trainer)
    for rows, starts, rehearsals in ((2, True, 1), (2, True, 1), (3, False, 1), (3, True, 2), (1, True, 2)):
        trainer.accelerator.sync_gradients = starts
        prepare(feature, trainer, rows)
        assert feature.telemetry()["rehearsals"] == rehearsals
    trainer.accelerator.sync_gradients = True
    feature.batch_prepared(trainer, batch(9))
    assert feature.telemetry()["rehearsals"] == 2, "an evaluation, which prepares its batches with gradients on"
    with torch.no_grad():
        prepare(feature, trainer, 9)
    assert feature.telemetry()["rehearsals"] == 2


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"])
def test_memory_that_a_library_lacks_moves_something_as_well(words: str) -> None:
    trainer, rank = Trainer(fails=["forward"]), Rank()
    trainer.failure = RuntimeError(words)
    prepare(feature_of(rank, trainer), trainer)
    assert rank.on == ["state"]


def test_only_a_failure_of_the_batch_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    trainer, rank = Trainer(fails=["forward"]), Rank()
    trainer.failure = ValueError("another kind")
    prepare(feature_of(rank, trainer), trainer)
    assert not rank.on and "could not be rehearsed: ValueError('another kind')" in caplog.text
    trainer = Trainer(fails=["forward"])
    trainer.failure = MemoryRoomError("a feature's")
    with pytest.raises(MemoryRoomError):
        prepare(feature_of(rank, trainer), trainer)


def test_the_peak_is_that_of_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rank = Trainer(fails=["backward"]), Rank()
    passes: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: passes.append(len(trainer.drawn)))
    prepare(feature_of(rank, trainer), trainer)
    assert passes == [0, 1]


def test_what_a_failed_rehearsal_made_is_gone_before_the_peak_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rank = Trainer(fails=["backward"]), Rank()
    alive: list[bool] = []
    monkeypatch.setattr(memory.gc, "collect", lambda: alive.append(trainer.made[0]() is not None))
    prepare(feature_of(rank, trainer), trainer)
    assert alive == [False]


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("fails", [[], ["forward"], ["backward"]], ids=str)
def test_a_rehearsal_waits_for_no_other_rank(fails: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rank = Trainer(fails=fails), Rank()
    model = trainer.model.model = DistributedDataParallel(trainer.net)
    trainer.accelerator.no_sync = lambda model: model.no_sync()
    synchronised: list[bool] = []
    monkeypatch.setattr(model, "_sync_buffers", lambda: synchronised.append(True))
    prepare(feature_of(rank, trainer), trainer)
    assert not synchronised and trainer.made[-1]() is None
    trainer.model_predict(batch())
    assert synchronised == [True], "the pass itself, as without a rehearsal"


def test_a_rank_tries_again_where_only_another_could_move_something(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rank = Trainer(fails=["forward"]), Rank()
    rank.decision = {"then": []}
    others = ["planted", "weights", None]
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: [*mine, others.pop(0)])
    feature = feature_of(rank, trainer)
    prepare(feature, trainer)
    assert feature.telemetry() == {"moved": 0, "rehearsals": 2} and not others


def test_what_was_given_or_moved_already_is_left_alone_and_the_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trainer, rank = Trainer(fails=["forward"] * 9), Rank(gradients="hbm")
    rank.on.append("state")
    prepare(feature_of(rank, trainer), trainer)
    assert rank.on == ["state", "weights", "activations"]
    assert "nothing is left that could leave HBM: planted" in caplog.text


def test_state_that_would_not_fit_beside_the_measured_peak_moves_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, rank = Trainer(fails=[]), Rank()
    rooms = [Allowance(0, "full"), Allowance(0, "full"), Allowance(5, "some")]
    monkeypatch.setattr(memory, "room_left", lambda runtime: rooms.pop(0))
    trainer.accelerator.device = torch.device("cuda")
    feature = feature_of(rank, trainer)
    prepare(feature, trainer)
    assert rank.on == ["state", "gradients"] and not rooms
    assert "optimizer's state would not fit: full" in feature.summary()["moved"][0]["why"]


def test_nothing_is_rehearsed_where_weights_could_not_move() -> None:
    trainer, rank = Trainer(fails=["forward"]), Rank()
    trainer.config.ramtorch = True
    feature = feature_of(rank, trainer)
    prepare(feature, trainer)
    assert feature.summary()["rehearsals"] == 0 and "ramtorch" in feature.summary()["not_rehearsed"]
