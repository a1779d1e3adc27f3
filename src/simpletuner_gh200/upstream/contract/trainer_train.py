"""The training loop."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "Trainer.train"
STEPS = "self.config.gradient_accumulation_steps"

SPEC = SeamSpec(
    name="trainer.train",
    module="simpletuner.helpers.training.trainer",
    qualname=WHERE,
    parameters=("self",),
    features=("ramp", "batch_path", "telemetry", "oversubscription"),
    reason="before it everything is prepared and resumed, after it the run is over",
    facts=(
        Fact(
            "one accumulation block",
            "the accumulation is changed between two of its entries, never inside one",
            facts.with_block(WHERE, "self.accelerator.accumulate"),
            features=("ramp",),
        ),
        Fact(
            "accumulation is only divided by and reduced modulo",
            "so that a value changed at a closed window is right everywhere in the loop",
            facts.operand_only(WHERE, STEPS, (ast.Div, ast.Mod)),
            features=("ramp",),
        ),
        Fact(
            "the loss is averaged over the window",
            "the reported loss follows the accumulation of its window",
            facts.mentions(WHERE, STEPS),
            features=("ramp",),
        ),
        Fact(
            "gradients through accelerate",
            "accelerate weighs each micro-batch by the accumulation of the moment",
            facts.mentions(WHERE, "self.accelerator.backward"),
            features=("ramp",),
        ),
        Fact(
            "steps when accelerate says so",
            "the optimizer steps at the end of a window, which accelerate decides",
            facts.mentions(WHERE, "self.accelerator.sync_gradients"),
            features=("ramp",),
        ),
        Fact(
            "manual validation is polled in the loop",
            "so that it fires with the ramp on, at any accumulation",
            facts.calls(WHERE, "self._consume_manual_validation_request"),
            features=("ramp",),
        ),
        Fact(
            "looks for a stop signal at the top of every turn",
            "the wait for a batch begins there",
            facts.calls(WHERE, "self._exit_on_signal", times=1),
            features=("telemetry",),
        ),
    ),
)
