"""Where one latent is fetched and pinned."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="collate.fetch_latent",
    module="simpletuner.helpers.training.collate",
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
