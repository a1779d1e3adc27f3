"""EMA: where its shadows are kept, and how they move."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

MODULE = "simpletuner.helpers.training.ema"

MOVES = SeamSpec(
    name="ema.to",
    module=MODULE,
    qualname="EMAModel.to",
    parameters=("self", "*args", "**kwargs"),
    features=("state",),
    reason="shadows that are moved get their new memory in Grace",
    facts=(
        Fact(
            "shadows are a list",
            "they are found there, and counted",
            facts.assigns("EMAModel.__init__", "self.shadow_params"),
        ),
        Fact(
            "moves only where ema_device is cpu",
            "with accelerator the shadows stay through every update",
            facts.mentions("EMAModel.step", "self.args.ema_device"),
        ),
    ),
)

SPECS = (MOVES,)
