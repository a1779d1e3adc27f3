"""Where the trainer asks whether somebody wants a checkpoint now."""

from __future__ import annotations

from simpletuner_gh200.upstream.spec import SeamSpec

SPEC = SeamSpec(
    name="trainer.manual_checkpoint",
    module="simpletuner.helpers.training.trainer",
    qualname="Trainer._consume_manual_checkpoint_request",
    parameters=("self",),
    features=("ramp",),
    reason="a request is taken at the end of a window, and not lost before it",
)
