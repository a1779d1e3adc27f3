"""Where a VAE cache is thrown away and made again."""

from __future__ import annotations

from simpletuner_gh200.upstream.spec import SeamSpec

SPEC = SeamSpec(
    name="caching.vae_rebuild",
    module="simpletuner.helpers.caching.vae",
    qualname="VAECache.rebuild_cache",
    parameters=("self",),
    features=("caches",),
    reason="entries of that cache are dropped first, on every rank, so that no stale latent is served",
)
