"""The builders' common way to a backend."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="datasets.builder_build",
    module="simpletuner.helpers.data_backend.builders.base",
    qualname="BaseBackendBuilder.build",
    parameters=("self", "config"),
    features=("store",),
    reason="every local dataset passes through _create_backend",
    facts=(
        Fact(
            "asks the subclass",
            "the method we wrap is the one that is called",
            facts.calls("BaseBackendBuilder.build", "self._create_backend", times=1, arguments=1),
        ),
    ),
)
