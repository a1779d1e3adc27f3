"""Where the trainer registers its checkpoint hooks."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "Trainer.init_hooks"

SPEC = SeamSpec(
    name="trainer.init_hooks",
    module="simpletuner.helpers.training.trainer",
    qualname=WHERE,
    parameters=("self",),
    features=("checkpoints",),
    reason="our state is saved and loaded by hooks registered next to upstream's",
    facts=(
        Fact("called on self", "a method replaced on the class is the one that runs", facts.looked_up_on_self(WHERE)),
        Fact(
            "saving goes through accelerate's hooks",
            "our hook runs with upstream's, before the checkpoint is complete",
            facts.calls(WHERE, "self.accelerator.register_save_state_pre_hook"),
        ),
        Fact(
            "loading goes through accelerate's hooks",
            "our hook runs with upstream's",
            facts.calls(WHERE, "self.accelerator.register_load_state_pre_hook"),
        ),
    ),
)
