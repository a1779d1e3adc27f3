"""The way of a configuration to SimpleTuner: its file, the fields that its parser is made from, its global state."""

from __future__ import annotations

from simpletuner_gh200.upstream.facts import (
    assigns,
    calls,
    contains,
    declares,
    dict_display,
    exists,
    lacks,
    mentions,
    methods,
)
from simpletuner_gh200.upstream.spec import fact, seam

READING = "simpletuner.helpers.configuration"
REGISTRY = "simpletuner.simpletuner_sdk.server.services.field_registry"
STATE = "simpletuner.helpers.training.state_tracker"

SPECS = (
    seam(
        "config.legacy_handlers",
        f"{READING}.cli_utils:_LEGACY_ARG_HANDLERS",
        "config: a block is a dict; without a handler it is dropped on its way from JSON or TOML to the parser",
        fact("a mapping", dict_display()),
        fact("asked by key", calls("_LEGACY_ARG_HANDLERS.get", arguments=1), "mapping_to_cli_args"),
        # That is the shape of our handlers.
        fact("called with value, arguments and extras", calls("handler", arguments=3), "mapping_to_cli_args"),
    ),
    seam(
        "config.env_map",
        f"{READING}.env_file:env_to_args_map",
        "config: the two blocks are also read from config.env",
        fact("a mapping", dict_display("DATALOADER_CONFIG")),
        # What is not in the table is never looked up.
        fact("read entry by entry", calls("env_to_args_map.items"), "load_env_config"),
    ),
    seam(
        "config.loader_helpers",
        f"{READING}.loader:helpers",
        "config: the raw configuration is what these readers return",
        fact("four readers", dict_display("json", "toml", "env", "cmd")),
        fact("looked up when loading", mentions("helpers"), "load_config"),
    ),
    seam(
        "field_registry.add_field",
        f"{REGISTRY}.registry:FieldRegistry._add_field(self, field)",
        "config: our two blocks become legal flags, shown in the Web UI, by being registered as fields",
        # The parser is built from the registry's fields, so a field added here becomes a flag.
        fact("keyed by name", contains("self._fields[field.name] = field")),
        fact("filled when it is made", calls("self._initialize_fields"), "FieldRegistry.__init__"),
        fact("one shared registry", exists, "field_registry"),
    ),
    seam(
        "field_registry.types",
        f"{REGISTRY}.types:ConfigField",
        "config: the fields we register are ConfigFields",
        # We give these by keyword.
        fact(
            "field names",
            declares(*("name", "arg_name", "ui_label", "field_type", "tab", "section", "default_value", "help_text")),
        ),
        # TEXT_JSON is newer; TEXTAREA is what we fall back on.
        fact("a type for long text", assigns("TEXTAREA"), "FieldType"),
    ),
    seam(
        "state_tracker.class",
        f"{STATE}:StateTracker",
        "config: the raw configuration and our settings are offered there, as the earlier guides promise",
        fact(
            "our names are free",
            lacks("get_raw_config", "set_raw_config", "get_gh200_runtime_config", "set_gh200_runtime_config"),
        ),
        # The caches find their backend instances there.
        fact("caches: keeps the backends in a table", assigns("data_backends")),
        # So do the default text cache and the batch path.
        fact(
            "caches: knows the text cache and the arguments",
            methods(
                "get_args(cls)", "get_accelerator(cls)", "get_vaecache(cls, id)", "get_default_text_embed_cache(cls)"
            ),
        ),
    ),
)
