"""The way of a configuration file to SimpleTuner's argument parser."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

LEGACY_HANDLERS = SeamSpec(
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


ENV_MAP = SeamSpec(
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


LOADER_HELPERS = SeamSpec(
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


SPECS = (
    LEGACY_HANDLERS,
    ENV_MAP,
    LOADER_HELPERS,
)
