"""The table that maps environment variables of ``config.env`` to flags."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="config.env_map",
    module="simpletuner.helpers.configuration.env_file",
    qualname="env_to_args_map",
    parameters=None,
    features=("config",),
    reason="the two blocks are also read from config.env",
    facts=(
        Fact("a mapping", "we add entries to it", facts.dict_display("env_to_args_map", ("DATALOADER_CONFIG",))),
        Fact(
            "read entry by entry",
            "what is not in the table is never looked up",
            facts.calls("load_env_config", "env_to_args_map.items"),
        ),
    ),
)
