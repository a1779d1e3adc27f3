"""Which files are sound and video."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SPEC = SeamSpec(
    name="media.extensions",
    module="simpletuner.helpers.training",
    qualname="audio_file_extensions",
    parameters=None,
    features=("store",),
    reason="sound and video keep upstream's way of reading, which wants a file",
    facts=(Fact("video too", "the same goes for them", facts.defines("video_file_extensions")),),
)
