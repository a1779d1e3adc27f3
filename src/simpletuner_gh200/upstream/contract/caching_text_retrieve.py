"""How the text-embed cache reads an embed."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "TextEmbeddingCache.load_from_cache"

SPEC = SeamSpec(
    name="caching.text_retrieve",
    module="simpletuner.helpers.caching.text_embeds",
    qualname=WHERE,
    parameters=None,
    features=("caches",),
    reason="hits are served by replacing methods on the backend instance behind the cache",
    facts=(
        Fact(
            "torch_load is looked up on the instance",
            "a method replaced on the instance is the one that is called",
            facts.calls(WHERE, "self.data_backend.torch_load", arguments=1),
        ),
        Fact(
            "torch_save is looked up on the instance",
            "what is written is known to our cache at once",
            facts.mentions("TextEmbeddingCache.process_write_batch", "self.data_backend.torch_save"),
        ),
    ),
)
