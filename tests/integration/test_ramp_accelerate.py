"""Windows on a real accelerate: lengths, weights, and what the loop reads in between."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.ramp.schedule import GH200GradientRamp, Window
from simpletuner_gh200.seams.features.ramp.windows import Windows, rate_patches
from simpletuner_gh200.seams.patch import Patches

accelerate = pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

RAMPS = (
    GH200GradientRamp(2, 10, 20, train_batch_size=2),
    GH200GradientRamp(10, 2, 20, train_batch_size=2, curve="linear"),
    GH200GradientRamp(1, 7, 15, curve="stepwise", increment=3),
)


class Run:
    """A loop shaped like SimpleTuner's: one weight whose gradient is 1 for every micro-batch."""

    def __init__(self, ramp: GH200GradientRamp) -> None:
        self.ramp = ramp
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
        self.accelerator.step, self.accelerator.sync_gradients = 0, True
        self.config = SimpleNamespace(gradient_accumulation_steps=3)
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.optimizer = self.accelerator.prepare(torch.optim.SGD([self.weight], lr=1.0))
        self.global_step = 0
        self.micro_batches = 0
        self.position = 0
        self.gradients: list[float] = []
        self.losses: list[float] = []
        self.lengths: list[int] = []
        self.fired: list[int] = []
        self.windows = Windows(self.accelerator, self.config, ramp.target_accumulation, self.next_window)
        self.patches = Patches()
        self.patches.install(self.windows.patch())

    def next_window(self) -> Window:
        return self.ramp.window(self.global_step)

    def train(self, steps: int) -> None:
        counter, loss_sum = self.global_step, 0.0
        while self.global_step < steps:
            counter += 1
            self.micro_batches += 1
            self.position += 1
            with self.accelerator.accumulate(torch.nn.Identity()):
                loss_sum += self.micro_batches / self.config.gradient_accumulation_steps
                self.accelerator.backward((self.weight * 1.0).sum())
                if self.accelerator.sync_gradients:
                    self.gradients.append(float(self.weight.grad))
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.losses.append(loss_sum)
                self.lengths.append(self.position)
                loss_sum, self.position = 0.0, 0
                self.global_step += 1
            if counter % self.config.gradient_accumulation_steps == 0:
                self.fired.append(self.global_step)


@pytest.fixture(params=RAMPS, ids=lambda ramp: ramp.curve)
def run(request: pytest.FixtureRequest) -> Run:
    made = Run(request.param)
    made.train(14)
    return made


def test_windows_have_the_lengths_of_the_schedule(run: Run) -> None:
    assert run.lengths == [window.accumulation for window in run.ramp.windows(14)]


def test_every_window_weighs_exactly_one(run: Run) -> None:
    # Each micro-batch adds the double nearest 1/n; a sum of n of them is off by at most n roundings.
    for length, gradient in zip(run.lengths, run.gradients, strict=True):
        assert abs(gradient - 1.0) <= length * torch.finfo(torch.float64).eps


def test_the_loss_is_the_mean_over_the_window(run: Run) -> None:
    start = 0
    for length, loss in zip(run.lengths, run.losses, strict=True):
        expected = sum(range(start + 1, start + length + 1)) / length
        assert loss == pytest.approx(expected, rel=length * torch.finfo(torch.float64).eps)
        start += length


def test_the_remainder_says_exactly_when_a_window_is_complete(run: Run) -> None:
    assert run.fired == list(range(1, 15))


def test_outside_the_block_the_configuration_holds_the_target(run: Run) -> None:
    between: Any = run.config.gradient_accumulation_steps
    assert between == run.ramp.target_accumulation
    assert 60 / between == 60 / run.ramp.target_accumulation
    assert max(between or 1, 1) == run.ramp.target_accumulation
    for copied in (copy.deepcopy(between), pickle.loads(pickle.dumps(between))):
        assert type(copied) is int
        assert copied == between


def test_uninstalling_leaves_a_plain_accelerator(run: Run) -> None:
    run.patches.remove()
    run.windows.let_go()
    assert "accumulate" not in vars(run.accelerator)
    assert type(run.config.gradient_accumulation_steps) is int


def test_without_the_reset_windows_would_not_weigh_one() -> None:
    """The mistake this exists to prevent: the accumulation changed, accelerate's own count kept."""
    run = Run(RAMPS[0])
    opened = run.windows._open

    def without_reset(window: Window) -> None:
        kept = run.accelerator.step
        opened(window)
        run.accelerator.step = kept

    run.windows._open = without_reset
    run.train(14)
    assert any(abs(gradient - 1.0) > 0.1 for gradient in run.gradients)


def test_the_rate_rule_touches_nothing_but_the_step() -> None:
    run = Run(RAMPS[0])
    rule = Patches()
    rule.install(*rate_patches(lambda: 0.5, run.optimizer, None))
    run.train(3)
    assert run.weight.item() == -1.5
    assert run.optimizer.param_groups[0]["lr"] == 1.0
    rule.remove()
    run.train(5)
    assert run.weight.item() == -3.5
