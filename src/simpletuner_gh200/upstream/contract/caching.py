"""SimpleTuner's caches: how each reads an entry, and where one is made anew."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SERVED = "hits are served by replacing methods on the backend instance behind the cache"


def _loads_through(reader: str, backend: str) -> Fact:
    reason = "a method replaced on the instance is the one that is called"
    calls = facts.calls(reader, f"{backend}.torch_load", arguments=1)
    return Fact("torch_load is looked up on the instance", reason, calls)


VAE_READ = SeamSpec(
    name="caching.vae_read",
    module="simpletuner.helpers.caching.vae",
    qualname="VAECache._read_from_storage",
    parameters=None,
    features=("caches",),
    reason=SERVED,
    facts=(
        _loads_through("VAECache._read_from_storage", "self.cache_data_backend"),
        Fact(
            "existence is asked of the instance",
            "so is this one",
            facts.calls("VAECache.encode_images", "self.cache_data_backend.exists", arguments=1),
        ),
        Fact(
            "reading goes through encode_images",
            "no other way leads from a file name to its latent",
            facts.calls("VAECache.retrieve_from_cache", "self.encode_images"),
        ),
        Fact(
            "names a sample's file",
            "a batch's latents are found by the names of their cache files",
            facts.signature("VAECache.generate_vae_cache_filename", ("self", "filepath")),
            features=("batch_path",),
        ),
    ),
)


VAE_REBUILD = SeamSpec(
    name="caching.vae_rebuild",
    module="simpletuner.helpers.caching.vae",
    qualname="VAECache.rebuild_cache",
    parameters=("self",),
    features=("caches",),
    reason="entries of that cache are dropped first, on every rank, so that no stale latent is served",
)


TEXT_RETRIEVE = SeamSpec(
    name="caching.text_retrieve",
    module="simpletuner.helpers.caching.text_embeds",
    qualname="TextEmbeddingCache.load_from_cache",
    parameters=None,
    features=("caches",),
    reason=SERVED,
    facts=(
        _loads_through("TextEmbeddingCache.load_from_cache", "self.data_backend"),
        Fact(
            "torch_save is looked up on the instance",
            "what is written is known to our cache at once",
            facts.mentions("TextEmbeddingCache.process_write_batch", "self.data_backend.torch_save"),
        ),
    ),
)


IMAGE_EMBED_READ = SeamSpec(
    name="caching.image_embed_read",
    module="simpletuner.helpers.caching.image_embed",
    qualname="ImageEmbedCache.retrieve_from_cache",
    parameters=None,
    features=("caches",),
    reason=SERVED,
    facts=(
        _loads_through("ImageEmbedCache.retrieve_from_cache", "self.cache_data_backend"),
        Fact(
            "existence is asked of the instance",
            "so is this one",
            facts.calls("ImageEmbedCache.retrieve_from_cache", "self.cache_data_backend.exists", arguments=1),
        ),
    ),
)


SPECS = (
    VAE_READ,
    VAE_REBUILD,
    TEXT_RETRIEVE,
    IMAGE_EMBED_READ,
)
