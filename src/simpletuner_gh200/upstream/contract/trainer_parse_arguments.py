"""Where the trainer reads its configuration and makes its accelerator."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "Trainer.parse_arguments"

SPEC = SeamSpec(
    name="trainer.parse_arguments",
    module="simpletuner.helpers.training.trainer",
    qualname=WHERE,
    parameters=("self", "args", "disable_accelerator", "exit_on_error"),
    features=("core",),
    reason="everything starts here: the settings are parsed and the features decided right after it",
    facts=(
        Fact("called on self", "a method replaced on the class is the one that runs", facts.looked_up_on_self(WHERE)),
        Fact("sets config", "features read self.config", facts.assigns(WHERE, "self.config")),
        Fact("sets accelerator", "its methods are hooked on the instance", facts.assigns(WHERE, "self.accelerator")),
        Fact(
            "accumulation comes from the configuration",
            "the ramp starts from that number",
            facts.mentions(WHERE, "self.config.gradient_accumulation_steps"),
            features=("ramp",),
        ),
    ),
)
