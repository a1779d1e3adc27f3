"""How long a whole run is: optimizer steps, samples, passes over the data, and seconds at least. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.ramp.outlook import ramp_from_settings, read_sizes


@dataclass(frozen=True)
class WholeRun:
    """All ranks together. ``seconds`` are those of its steps, at least: what starts and saves comes on top."""

    steps: int
    samples: int
    passes: float | None
    """Times that a sample is seen; None where nobody counted them."""
    seconds: float


def whole_run(training: Training, facts: RunFacts, least: float, data: int) -> WholeRun | None:
    """``least``: seconds of a step with the largest window; ``data``: samples there are, 0 where nobody counted.

    None where the configuration gives no steps, or epochs of data that nobody counted.
    """
    sizes, unreadable = read_sizes(training.effective, facts.ranks)
    largest = facts.batch * facts.accumulation * facts.ranks
    if unreadable:
        return None
    settings = training.settings.part(RampSettings) if training.settings is not None else None
    ramped = settings is not None and settings.enable_batch_size_rampup and not sizes.by_epochs
    steps, samples = sizes.max_train_steps, sizes.max_train_steps * largest
    if sizes.by_epochs:
        samples = round(sizes.num_train_epochs * data)
        steps = -(-samples // largest)
    elif settings is not None and ramped:
        samples = ramp_from_settings(settings, sizes).window(steps).samples
    if not steps:
        return None
    return WholeRun(steps, samples, samples / data if data else None, samples / largest * least)
