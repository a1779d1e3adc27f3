"""When SimpleTuner validates."""

from __future__ import annotations

from simpletuner_gh200.upstream.spec import SeamSpec

MODULE = "simpletuner.helpers.training.validation"

INTERMEDIARY = SeamSpec(
    name="validation.intermediary",
    module=MODULE,
    qualname="Validation.should_perform_intermediary_validation",
    parameters=None,
    features=("ramp",),
    reason="nothing is validated in the middle of a window",
)


EPOCH_RELATIVE_STEP = SeamSpec(
    name="validation.epoch_relative_step",
    module=MODULE,
    qualname="Validation._epoch_relative_step",
    parameters=("self", "steps_per_epoch"),
    features=("ramp",),
    reason="steps per epoch change during a ramp, so the end of the data decides",
    optional=True,
)


SPECS = (
    INTERMEDIARY,
    EPOCH_RELATIVE_STEP,
)
