"""Pixels from bytes in memory, exactly as SimpleTuner's own loaders give them from files."""

from __future__ import annotations

import os
from typing import Any

from simpletuner_gh200.memory.mapping import memfd_of


def decode_image(content: Any) -> Any:
    from simpletuner.helpers.image_manipulation.load import load_image

    return load_image(bytes(content))


def decode_video(content: Any) -> Any:
    """Its decoder wants the name of a file: one in memory has one as long as it is open."""
    from simpletuner.helpers.image_manipulation.load import load_video

    fd = memfd_of("video", content)
    try:
        return load_video(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
