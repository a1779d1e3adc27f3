"""How bytes become images, and which files are sound and video."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

LOAD_IMAGE = SeamSpec(
    name="images.load_image",
    module="simpletuner.helpers.image_manipulation.load",
    qualname="load_image",
    parameters=("img_data",),
    features=("store",),
    reason="staged bytes are decoded by upstream's own loader, so that pixels are the same",
)


EXTENSIONS = SeamSpec(
    name="media.extensions",
    module="simpletuner.helpers.training",
    qualname="audio_file_extensions",
    parameters=None,
    features=("store",),
    reason="sound and video keep upstream's way of reading, which wants a file",
    facts=(Fact("video too", "the same goes for them", facts.defines("video_file_extensions")),),
)


SPECS = (
    LOAD_IMAGE,
    EXTENSIONS,
)
