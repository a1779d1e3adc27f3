"""Where a dataset's caches are kept."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

ENTRIES = ("vaecache", "text_embed_cache", "conditioning_image_embed_cache", "distillation_cache")


def _set_by_name(scope: ast.AST) -> str | None:
    targets = (target for node in syntax.nodes(scope) if isinstance(node, ast.Assign) for target in node.targets)
    keys = {target.slice.value for target in targets if _is_text_key(target)}  # type: ignore[attr-defined]
    missing = [name for name in ENTRIES if name not in keys]
    return f"no dataset gets {', '.join(missing)}" if missing else None


def _is_text_key(target: ast.AST) -> bool:
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)


SPEC = SeamSpec(
    name="datasets.caches",
    module="simpletuner.helpers.data_backend.factory",
    qualname="FactoryRegistry",
    parameters=None,
    features=("caches",),
    reason="the caches to be served are found in the datasets' entries",
    facts=(
        Fact(
            "entries by these names",
            "a cache under another name would not be served",
            facts.inside("FactoryRegistry", _set_by_name),
        ),
    ),
)
