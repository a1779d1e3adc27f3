"""The abstract backend: what any backend behind a cache is certain to have."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.contract.backend_local import METHODS
from simpletuner_gh200.upstream.spec import Fact, SeamSpec


def _abstract_methods(scope: ast.AST) -> str | None:
    found = {
        node.name
        for node in ast.walk(scope)
        if isinstance(node, syntax.Function) and any(syntax.dotted(d) == "abstractmethod" for d in node.decorator_list)
    }
    missing = sorted(set(METHODS) - found)
    return f"BaseDataBackend without abstract {', '.join(missing)}" if missing else None


SPEC = SeamSpec(
    name="backend.base",
    module="simpletuner.helpers.data_backend.base",
    qualname="BaseDataBackend",
    parameters=None,
    features=("caches",),
    reason="the caches are attached to whatever backend stands behind them",
    facts=(
        Fact(
            "the fifteen are abstract",
            "so that every backend has them",
            facts.inside("BaseDataBackend", _abstract_methods),
        ),
    ),
)
