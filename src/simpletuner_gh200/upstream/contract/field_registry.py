"""Where SimpleTuner collects its configuration fields: command line and Web UI are made from them."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

ADD_FIELD = SeamSpec(
    name="field_registry.add_field",
    module="simpletuner.simpletuner_sdk.server.services.field_registry.registry",
    qualname="FieldRegistry._add_field",
    parameters=("self", "field"),
    features=("config",),
    reason="our two blocks become legal flags, shown in the Web UI, by being registered as fields",
    facts=(
        Fact(
            "keyed by name",
            "the parser is built from the registry's fields, so a field added here becomes a flag",
            facts.contains("FieldRegistry._add_field", "self._fields[field.name] = field"),
        ),
        Fact(
            "one shared registry",
            "our fields go into the instance the parser reads",
            facts.all_of(
                facts.calls("FieldRegistry.__init__", "self._initialize_fields"),
                facts.defines("field_registry"),
            ),
        ),
    ),
)


FILLED_IN = ("name", "arg_name", "ui_label", "field_type", "tab", "section", "default_value", "help_text")


def _field_names(scope: ast.AST) -> str | None:
    declared = {syntax.dotted(node.target) for node in ast.walk(scope) if isinstance(node, ast.AnnAssign)}
    missing = [name for name in FILLED_IN if name not in declared]
    return f"ConfigField without {', '.join(missing)}" if missing else None


TYPES = SeamSpec(
    name="field_registry.types",
    module="simpletuner.simpletuner_sdk.server.services.field_registry.types",
    qualname="ConfigField",
    parameters=None,
    features=("config",),
    reason="the fields we register are ConfigFields",
    facts=(
        Fact("field names", "we give these by keyword", facts.inside("ConfigField", _field_names)),
        Fact(
            "a type for long text",
            "TEXT_JSON is newer; TEXTAREA is what we fall back on",
            facts.assigns("FieldType", "TEXTAREA"),
        ),
    ),
)


SPECS = (
    ADD_FIELD,
    TYPES,
)
