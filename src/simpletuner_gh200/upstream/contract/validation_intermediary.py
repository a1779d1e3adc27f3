"""Where validation decides whether it is due."""

from __future__ import annotations

from simpletuner_gh200.upstream.spec import SeamSpec

SPEC = SeamSpec(
    name="validation.intermediary",
    module="simpletuner.helpers.training.validation",
    qualname="Validation.should_perform_intermediary_validation",
    parameters=None,
    features=("ramp",),
    reason="nothing is validated in the middle of a window",
)
