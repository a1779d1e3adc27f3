"""Where the dataset list is read."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="datasets.load_configuration",
    module="simpletuner.helpers.data_backend.factory",
    qualname="FactoryRegistry.load_configuration",
    parameters=("self",),
    features=("store",),
    reason='entries of type "in_memory" are noted and rewritten to "local" right after the list was read',
    facts=(
        Fact(
            "returns the list",
            "what we return is what the factory goes on with",
            facts.all_of(
                facts.contains("FactoryRegistry.load_configuration", "return data_backend_config"),
                facts.mentions("FactoryRegistry", "self.load_configuration"),
            ),
        ),
        Fact(
            "an unknown type passes validation",
            '"in_memory" is still in the list while upstream validates it',
            facts.tolerated("FactoryRegistry.load_configuration", "self._validate_with_config_registry"),
        ),
    ),
)
