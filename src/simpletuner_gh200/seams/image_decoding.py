"""Bytes to pixels, exactly as SimpleTuner's own loader gives them."""

from __future__ import annotations

from typing import Any


def decode_image(content: bytes) -> Any:
    from simpletuner.helpers.image_manipulation.load import load_image

    return load_image(content)
