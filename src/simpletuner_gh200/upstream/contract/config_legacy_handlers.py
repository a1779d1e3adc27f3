"""The table of handlers that turns configuration entries into command-line arguments."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="config.legacy_handlers",
    module="simpletuner.helpers.configuration.cli_utils",
    qualname="_LEGACY_ARG_HANDLERS",
    parameters=None,
    features=("config",),
    reason="a block is a dict; without a handler it is dropped on its way from JSON or TOML to the parser",
    facts=(
        Fact("a mapping", "we add entries to it", facts.dict_display("_LEGACY_ARG_HANDLERS", ())),
        Fact(
            "asked by key",
            "the handler is found by the entry's name",
            facts.calls("mapping_to_cli_args", "_LEGACY_ARG_HANDLERS.get", arguments=1),
        ),
        Fact(
            "called with value, arguments and extras",
            "that is the shape of our handlers",
            facts.calls("mapping_to_cli_args", "handler", arguments=3),
        ),
    ),
)
