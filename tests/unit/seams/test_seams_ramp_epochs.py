"""A run that is given by its epochs: what they hold is counted as SimpleTuner counts it, whenever it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.seams.features.ramp.deferral import EpochsToSteps


class Trainer:
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
    trainer = Trainer(num_train_epochs=epochs, **counted)
    steps = EpochsToSteps(trainer, lambda found: asked.append(found) or 7)
    steps.install()
    trainer.config.num_train_epochs = 99  # upstream rounds it up on the way
    for _time in range(2):
        trainer._recalculate_training_steps()
        assert trainer.config.max_train_steps == 7, "what upstream derived is replaced"
    assert asked == [micro_batches] * 2
    steps.uninstall()
    trainer._recalculate_training_steps()
    assert trainer.config.max_train_steps == 999
