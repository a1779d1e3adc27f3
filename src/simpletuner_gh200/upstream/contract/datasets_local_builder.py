"""Where a local dataset's backend is made."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="datasets.local_builder",
    module="simpletuner.helpers.data_backend.builders.local",
    qualname="LocalBackendBuilder._create_backend",
    parameters=("self", "config"),
    features=("store",),
    reason="for an id of ours our subclass of LocalDataBackend is returned instead",
    facts=(
        Fact(
            "the id comes with the configuration",
            "ours are known by id, because the configuration class drops unknown keys",
            facts.mentions("LocalBackendBuilder._create_backend", "config.id"),
        ),
        Fact(
            "compression by one helper",
            "our backend is made with the same compression setting",
            facts.calls("LocalBackendBuilder._create_backend", "self._get_compression_setting", arguments=1),
        ),
    ),
)
