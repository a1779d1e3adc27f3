"""Where a batch's latents are checked and stacked."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

STACK = "torch.stack([_latent.to(StateTracker.get_accelerator().device) for _latent in latents], dim=0)"
LATENTS = ("latent", "_latent")
LOOKED_AT = {"shape", "to"}


def _only_looks(scope: ast.AST) -> str | None:
    taken = [
        node for node in syntax.nodes(scope) if isinstance(node, ast.Attribute) and syntax.dotted(node.value) in LATENTS
    ]
    others = sorted({node.attr for node in taken} - LOOKED_AT)
    return f"{', '.join(others)} of a latent in check_latent_shapes" if others else None


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
