"""Where the trainer sends its events."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "Trainer._emit_event"

SPEC = SeamSpec(
    name="trainer.emit_event",
    module="simpletuner.helpers.training.trainer",
    qualname=WHERE,
    parameters=("self", "event", "message_level"),
    features=("telemetry",),
    reason="our metrics are added to training status events",
    facts=(
        Fact("called on self", "a method replaced on the class is the one that runs", facts.looked_up_on_self(WHERE)),
        Fact(
            "sends the very dict it got",
            "what we add to the event is sent",
            facts.inside(WHERE, facts.passes("self.webhook_handler.send_raw", "event")),
        ),
    ),
)
