"""Where accelerate weighs a micro-batch."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="accelerate.backward",
    module="accelerate.accelerator",
    qualname="Accelerator.backward",
    parameters=("self", "loss", "**kwargs"),
    features=("ramp",),
    reason="each micro-batch counts one n-th of a window of n",
    facts=(
        Fact(
            "divides by the accumulation of the moment",
            "the weights of a window add up to one only if its accumulation is constant and used here",
            facts.contains("Accelerator.backward", "loss = loss / self.gradient_accumulation_steps"),
        ),
    ),
)
