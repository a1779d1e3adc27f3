"""How the VAE cache reads a latent."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

WHERE = "VAECache._read_from_storage"

SPEC = SeamSpec(
    name="caching.vae_read",
    module="simpletuner.helpers.caching.vae",
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
