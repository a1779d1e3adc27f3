"""Where SimpleTuner collects its configuration fields: the command line and the Web UI are made from them."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
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
