"""Where a batch's text embeds are fetched and stacked."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

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
    ),
)
