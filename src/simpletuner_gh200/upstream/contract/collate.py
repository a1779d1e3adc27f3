"""Where samples become a batch."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

MODULE = "simpletuner.helpers.training.collate"

COMPUTE_LATENTS = SeamSpec(
    name="collate.compute_latents",
    module=MODULE,
    qualname="compute_latents",
    parameters=("filepaths", "data_backend_id", "model"),
    features=("batch_path",),
    reason="a batch's latents come straight from the slab",
    facts=(
        Fact(
            "collate_fn looks it up by name",
            "a replaced module global is the one that is called",
            facts.calls("collate_fn", "compute_latents", arguments=3),
        ),
    ),
)


STACK = "torch.stack([_latent.to(StateTracker.get_accelerator().device) for _latent in latents], dim=0)"
_NAMES_OF_A_LATENT = ("latent", "_latent")
LOOKED_AT = {"shape", "to"}


def _only_looks(scope: ast.AST) -> str | None:
    taken = [
        node
        for node in syntax.nodes(scope)
        if isinstance(node, ast.Attribute) and syntax.dotted(node.value) in _NAMES_OF_A_LATENT
    ]
    others = sorted({node.attr for node in taken} - LOOKED_AT)
    return f"{', '.join(others)} of a latent in check_latent_shapes" if others else None


CHECK_LATENT_SHAPES = SeamSpec(
    name="collate.check_latent_shapes",
    module=MODULE,
    qualname="check_latent_shapes",
    parameters=("latents", "filepaths", "data_backend_id", "batch", "is_conditioning"),
    features=("batch_path",),
    reason="a batch that was assembled in place is not stacked a second time",
    facts=(
        Fact(
            "collate_fn looks it up by name",
            "a replaced module global is the one that is called",
            facts.calls("collate_fn", "check_latent_shapes"),
        ),
        Fact(
            "stacks them on the device",
            "that is what a batch assembled in place already is",
            facts.contains("check_latent_shapes", STACK),
        ),
        Fact(
            "only looks at shapes and values",
            "so that stand-ins can go through the checks of the samples in their place",
            facts.inside("check_latent_shapes", _only_looks),
        ),
    ),
)


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


COMPUTE_PROMPT_EMBEDDINGS = SeamSpec(
    name="collate.compute_prompt_embeddings",
    module=MODULE,
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


FETCH_LATENT = SeamSpec(
    name="collate.fetch_latent",
    module=MODULE,
    qualname="fetch_latent",
    parameters=("fp", "data_backend_id"),
    features=("batch_path",),
    reason="a latent that is pinned already is not pinned again",
    facts=(
        Fact(
            "compute_latents looks it up by name",
            "a replaced module global is the one that is called",
            facts.mentions("compute_latents", "fetch_latent"),
        ),
        Fact(
            "asks the VAE cache of the dataset",
            "which is where our hits are served",
            facts.calls("fetch_latent", "StateTracker.get_vaecache"),
        ),
    ),
)


SPECS = (
    COMPUTE_LATENTS,
    CHECK_LATENT_SHAPES,
    COMPUTE_PROMPT_EMBEDDINGS,
    FETCH_LATENT,
)
