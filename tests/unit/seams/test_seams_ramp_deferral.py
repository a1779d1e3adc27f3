"""What upstream would do in mid-window waits for the window's end, and happens once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.seams.features.ramp.windows import Deferral, epochs_to_steps
from simpletuner_gh200.seams.patch import Patches


class Validation:
    wanted = False

    def should_perform_intermediary_validation(self, step: int, prompts: object, kind: str, **more: object) -> bool:
        return self.wanted


class Trainer:
    """The four methods as SimpleTuner has them."""

    def __init__(self) -> None:
        self.validation = Validation()
        self.manual_validation = self.manual_checkpoint = False

    def _consume_manual_validation_request(self) -> bool:
        requested, self.manual_validation = self.manual_validation, False
        return requested

    def _consume_manual_checkpoint_request(self) -> bool:
        requested, self.manual_checkpoint = self.manual_checkpoint, False
        return requested

    def _should_checkpoint_epoch(self, epoch: int) -> bool:
        return epoch % 2 == 0


class Loop:
    def __init__(self) -> None:
        self.trainer = Trainer()
        self.open = False
        self.deferral = Deferral(self.trainer, lambda: self.open, lambda: 0)
        self.patches = Patches()
        self.patches.install(*self.deferral.patches())

    def validates(self, **more: object) -> bool:
        return self.trainer.validation.should_perform_intermediary_validation(3, ["a"], "intermediary", **more)


def test_a_manual_validation_is_kept_until_the_window_closes() -> None:
    loop = Loop()
    loop.trainer.manual_validation, loop.open = True, True
    assert [loop.trainer._consume_manual_validation_request() for _ in range(3)] == [False] * 3
    loop.open = False
    assert loop.trainer._consume_manual_validation_request()
    assert not loop.trainer._consume_manual_validation_request()


def test_an_epoch_checkpoint_in_mid_window_is_made_at_its_end() -> None:
    loop = Loop()
    loop.open = True
    assert not loop.trainer._should_checkpoint_epoch(2)
    loop.open = False
    assert loop.trainer._consume_manual_checkpoint_request()
    assert not loop.trainer._consume_manual_checkpoint_request()


def test_an_epoch_that_ends_with_its_window_is_left_alone() -> None:
    loop = Loop()
    assert loop.trainer._should_checkpoint_epoch(2)
    assert not loop.trainer._should_checkpoint_epoch(3)
    assert not loop.trainer._consume_manual_checkpoint_request()


def test_a_manual_and_a_deferred_checkpoint_are_one() -> None:
    loop = Loop()
    loop.open = True
    loop.trainer._should_checkpoint_epoch(2)
    loop.open, loop.trainer.manual_checkpoint = False, True
    assert loop.trainer._consume_manual_checkpoint_request()
    assert not loop.trainer._consume_manual_checkpoint_request()


def test_a_validation_due_in_mid_window_runs_at_its_end_only() -> None:
    loop = Loop()
    loop.open, loop.trainer.validation.wanted = True, True
    assert not loop.validates(epoch_end=True)
    loop.trainer.validation.wanted = False
    assert not loop.validates()
    loop.open = False
    # Upstream asks twice: whether it would validate, and then in the validation itself.
    assert [loop.validates(), loop.validates()] == [True, True]
    loop.deferral.window_opened(object())
    assert not loop.validates()


def test_everything_is_put_back() -> None:
    loop = Loop()
    loop.patches.remove()
    loop.open, loop.trainer.manual_validation = True, True
    assert loop.trainer._consume_manual_validation_request()
    assert set(vars(loop.trainer)) == {"validation", "manual_validation", "manual_checkpoint"}


def test_what_someone_else_wrapped_since_is_left_in_place() -> None:
    loop = Loop()
    ours = loop.trainer._consume_manual_validation_request
    loop.trainer._consume_manual_validation_request = theirs = lambda: ours()
    loop.open = False
    loop.patches.remove()
    assert loop.trainer._consume_manual_validation_request is theirs
    loop.trainer.manual_validation = True
    assert loop.trainer._consume_manual_validation_request()


# -- runs that are given by their epochs -----------------------------------------------------------------


class Counting:
    """Counts as SimpleTuner does: by the target's accumulation, and again when everything is prepared."""

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(max_train_steps=0, **config)

    def _recalculate_training_steps(self) -> None:
        self.config.max_train_steps = 999


@pytest.mark.parametrize(
    ("epochs", "counted", "micro_batches"),
    [
        (2, {"total_num_batches": 10}, 20),
        (0.5, {"total_num_batches": 10}, 5),
        (3, {"total_num_batches": 14, "epoch_batches_schedule": {1: 10, 2: 4}}, 10 + 14 + 14),
        (2.5, {"total_num_batches": 14, "epoch_batches_schedule": {1: 10, 3: 4}}, 10 + 10 + 7),
    ],
)
def test_the_micro_batches_of_all_epochs(epochs, counted, micro_batches):
    asked = []
    trainer = Counting(num_train_epochs=epochs, **counted)
    patches = Patches()
    patches.install(epochs_to_steps(trainer, lambda found: asked.append(found) or 7))
    trainer.config.num_train_epochs = 99  # upstream rounds it up on the way
    for _time in range(2):
        trainer._recalculate_training_steps()
        assert trainer.config.max_train_steps == 7, "what upstream derived is replaced"
    assert asked == [micro_batches] * 2
    patches.remove()
    trainer._recalculate_training_steps()
    assert trainer.config.max_train_steps == 999
