"""SimpleTuner's global state."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

MODULE = "simpletuner.helpers.training.state_tracker"

OURS = ("get_raw_config", "set_raw_config", "get_gh200_runtime_config", "set_gh200_runtime_config")

ASKED: dict[str, tuple[str, ...]] = {
    "get_args": ("cls",),
    "get_accelerator": ("cls",),
    "get_vaecache": ("cls", "id"),
    "get_default_text_embed_cache": ("cls",),
}

CLASS = SeamSpec(
    name="state_tracker.class",
    module=MODULE,
    qualname="StateTracker",
    parameters=None,
    features=("config",),
    reason="the raw configuration and our settings are offered there, as the earlier guides promise",
    facts=(
        Fact("our names are free", "we add them, and replace nothing", facts.lacks("StateTracker", OURS)),
        Fact(
            "keeps the backends in a table",
            "the caches find their backend instances there",
            facts.assigns("StateTracker", "data_backends"),
            features=("caches",),
        ),
        Fact(
            "knows the text cache and the arguments",
            "so do the default text cache and the batch path",
            facts.methods("StateTracker", ASKED),
            features=("caches",),
        ),
    ),
)


SPECS = (CLASS,)
