"""The map from a dataset's type to its builder."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec


def _ours_is_free(scope: ast.AST) -> str | None:
    taken = [node for node in ast.walk(scope) if "in_memory" in syntax.string_keys(node)]
    return "a builder of its own for in_memory" if taken else None


SPEC = SeamSpec(
    name="backend.builder_map",
    module="simpletuner.helpers.data_backend.builders",
    qualname="create_backend_builder",
    parameters=("backend_type", "accelerator", "args"),
    features=("store",),
    reason="the Web UI's dataset scan asks for builders by type, and gets the local one for ours",
    facts=(
        Fact(
            "a literal map with local in it",
            "our type is served by the local builder",
            facts.dict_display("builder_mapping", ("local",), within="create_backend_builder"),
        ),
        Fact(
            "in_memory is not upstream's",
            "the name means our store",
            facts.inside("create_backend_builder", _ours_is_free),
        ),
    ),
)
