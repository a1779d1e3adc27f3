"""Epochs by micro-batches, and who is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from simpletuner_gh200.ramp.schedule import epoch_progress
from simpletuner_gh200.seams.features.ramp.deferral import Epochs


@pytest.mark.parametrize(
    ("epoch", "consumed", "expected"),
    [(1, 0, 0.0), (1, 6, 0.5), (1, 12, 1.0), (1, 15, 1.0), (2, 12, 1.0), (2, 15, 1.25), (2, 5, 1.0), (3, 24, 2.0)],
)
def test_progress_follows_the_data(epoch: int, consumed: int, expected: float) -> None:
    assert epoch_progress(epoch, consumed, lambda _: 12) == expected


def test_an_epoch_without_data_makes_no_progress() -> None:
    assert epoch_progress(1, 5, lambda _: 0) == 0.0


class Validation:
    def _epoch_relative_step(self, steps_per_epoch: int) -> int | None:
        return steps_per_epoch


class Evaluation:
    def _epoch_progress(self, training_state: dict[str, int], steps_per_epoch: float) -> float | None:
        return -1.0


def test_both_are_asked_by_data_and_put_back() -> None:
    config = SimpleNamespace(epoch_batches_schedule={1: 10, 2: 10})
    trainer = SimpleNamespace(config=config, validation=Validation(), evaluation=Evaluation())
    epochs = Epochs(trainer, lambda: 20)
    epochs.install()
    assert trainer.validation._epoch_relative_step(3) is None
    # Ten batches in the first epoch; a second dataset joins in the second.
    assert trainer.evaluation._epoch_progress({"current_epoch": 2}, 3) == 1.5
    epochs.uninstall()
    assert trainer.validation._epoch_relative_step(3) == 3
    assert trainer.evaluation._epoch_progress({"current_epoch": 2}, 3) == -1.0


def test_older_releases_and_runs_without_either_are_left_alone() -> None:
    config = SimpleNamespace(total_num_batches=8)
    trainer = SimpleNamespace(config=config, validation=None, evaluation=Evaluation())
    epochs = Epochs(trainer, lambda: 4)
    epochs.install()
    assert trainer.evaluation._epoch_progress({}, 3) == 0.5
