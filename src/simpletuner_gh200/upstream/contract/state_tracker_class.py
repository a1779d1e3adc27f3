"""SimpleTuner's global state."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

OURS = ("get_raw_config", "set_raw_config", "get_gh200_runtime_config", "set_gh200_runtime_config")

SPEC = SeamSpec(
    name="state_tracker.class",
    module="simpletuner.helpers.training.state_tracker",
    qualname="StateTracker",
    parameters=None,
    features=("config",),
    reason="the raw configuration and our settings are offered there, as the earlier guides promise",
    facts=(
        Fact("our names are free", "we add them, and replace nothing", facts.lacks("StateTracker", OURS)),
        Fact(
            "knows backends and caches",
            "the caches find their backend instances through it",
            facts.methods("StateTracker", {"get_args": ("cls",), "get_data_backends": ("cls", "_type", "_types")}),
            features=("caches",),
        ),
    ),
)
