"""Where a collated batch is made ready for the model."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "Trainer.prepare_batch"

SPEC = SeamSpec(
    name="trainer.prepare_batch",
    module="simpletuner.helpers.training.trainer",
    qualname=WHERE,
    parameters=("self", "batch"),
    features=("hints",),
    reason="placement hints go onto the tensors of the prepared batch",
    facts=(
        Fact(
            "the loop calls it on self",
            "every training batch passes through it",
            facts.calls("Trainer.train", "self.prepare_batch"),
        ),
        Fact(
            "an empty batch comes back as it is",
            "False means the end of the epoch, and must reach the loop",
            facts.contains(WHERE, "return batch"),
        ),
    ),
)
