"""How the image-embed cache reads an embed."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "ImageEmbedCache.retrieve_from_cache"

SPEC = SeamSpec(
    name="caching.image_embed_read",
    module="simpletuner.helpers.caching.image_embed",
    qualname=WHERE,
    parameters=None,
    features=("caches",),
    reason="hits are served by replacing methods on the backend instance behind the cache",
    facts=(
        Fact(
            "torch_load is looked up on the instance",
            "a method replaced on the instance is the one that is called",
            facts.calls(WHERE, "self.cache_data_backend.torch_load", arguments=1),
        ),
        Fact(
            "existence is asked of the instance",
            "so is this one",
            facts.calls(WHERE, "self.cache_data_backend.exists", arguments=1),
        ),
    ),
)
