"""The table of configuration readers: JSON, TOML, ENV, command line."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="config.loader_helpers",
    module="simpletuner.helpers.configuration.loader",
    qualname="helpers",
    parameters=None,
    features=("config",),
    reason="the raw configuration is what these readers return",
    facts=(
        Fact(
            "four readers", "each is wrapped by its key", facts.dict_display("helpers", ("json", "toml", "env", "cmd"))
        ),
        Fact(
            "looked up when loading",
            "a replaced entry is the one that is called",
            facts.mentions("load_config", "helpers"),
        ),
    ),
)
