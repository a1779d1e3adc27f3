"""Where datasets, caches and samplers are made."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "Trainer.init_data_backend"

SPEC = SeamSpec(
    name="trainer.init_data_backend",
    module="simpletuner.helpers.training.trainer",
    qualname=WHERE,
    parameters=("self",),
    features=("caches", "store"),
    reason="after it the backend instances behind the caches exist, and ours are attached to them",
    facts=(
        Fact("called on self", "a method replaced on the class is the one that runs", facts.looked_up_on_self(WHERE)),
        Fact(
            "configures all backends in one call",
            "datasets and caches are complete when it returns",
            facts.calls(WHERE, "configure_multi_databackend"),
        ),
    ),
)
