"""The shape of a configuration field, which we fill in."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

FILLED_IN = ("name", "arg_name", "ui_label", "field_type", "tab", "section", "default_value", "help_text")


def _field_names(scope: ast.AST) -> str | None:
    declared = {syntax.dotted(node.target) for node in ast.walk(scope) if isinstance(node, ast.AnnAssign)}
    missing = [name for name in FILLED_IN if name not in declared]
    return f"ConfigField without {', '.join(missing)}" if missing else None


SPEC = SeamSpec(
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
