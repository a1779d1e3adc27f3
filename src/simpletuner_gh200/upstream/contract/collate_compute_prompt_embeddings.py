"""Where a batch's text embeds are fetched and stacked."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

JOINED = {
    "prompt_embeds",
    "pooled_prompt_embeds",
    "attention_mask",
    "prompt_attention_mask",
    "attention_masks",
    "time_ids",
}


def _joins_these(scope: ast.AST) -> str | None:
    tests = [node for node in syntax.nodes(scope) if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)]
    keys = {node.left.value for node in tests if isinstance(node.left, ast.Constant)}
    return None if keys == JOINED else f"joins {', '.join(sorted(map(str, keys)))}"


SPEC = SeamSpec(
    name="collate.compute_prompt_embeddings",
    module="simpletuner.helpers.training.collate",
    qualname="compute_prompt_embeddings",
    parameters=("prompt_entries", "text_embed_cache", "model"),
    features=("batch_path",),
    reason="a batch's text embeds come straight from the slab",
    facts=(
        Fact(
            "collate_fn looks it up by name",
            "a replaced module global is the one that is called",
            facts.calls("collate_fn", "compute_prompt_embeddings", arguments=3),
        ),
        Fact(
            "asks the model to join",
            "our joining is what the model answers",
            facts.calls("compute_prompt_embeddings", "model.collate_prompt_embeds", times=1, arguments=1),
        ),
        Fact(
            "joins the rest itself",
            "we join the same six when the model has no way of its own; another one would be lost",
            facts.inside("compute_prompt_embeddings", _joins_these),
        ),
    ),
)
