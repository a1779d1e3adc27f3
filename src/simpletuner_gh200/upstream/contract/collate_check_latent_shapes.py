"""Where a batch's latents are checked and stacked."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="collate.check_latent_shapes",
    module="simpletuner.helpers.training.collate",
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
    ),
)
