"""How far into its epoch validation thinks the run is."""

from __future__ import annotations

from simpletuner_gh200.upstream.spec import SeamSpec

SPEC = SeamSpec(
    name="validation.epoch_relative_step",
    module="simpletuner.helpers.training.validation",
    qualname="Validation._epoch_relative_step",
    parameters=("self", "steps_per_epoch"),
    features=("ramp",),
    reason="steps per epoch change during a ramp, so the end of the data decides",
    optional=True,
)
