"""Where bytes become an image."""

from __future__ import annotations

from simpletuner_gh200.upstream.spec import SeamSpec

SPEC = SeamSpec(
    name="images.load_image",
    module="simpletuner.helpers.image_manipulation.load",
    qualname="load_image",
    parameters=("img_data",),
    features=("store",),
    reason="staged bytes are decoded by upstream's own loader, so that pixels are the same",
)
