"""Where a batch's latents are fetched."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="collate.compute_latents",
    module="simpletuner.helpers.training.collate",
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
