"""Where the trainer decides on a checkpoint at an epoch's end."""

from __future__ import annotations

from simpletuner_gh200.upstream.spec import SeamSpec

SPEC = SeamSpec(
    name="trainer.should_checkpoint_epoch",
    module="simpletuner.helpers.training.trainer",
    qualname="Trainer._should_checkpoint_epoch",
    parameters=("self", "epoch"),
    features=("ramp",),
    reason="a checkpoint at an epoch's end waits for the end of the window",
)
