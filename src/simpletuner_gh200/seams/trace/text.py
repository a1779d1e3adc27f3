"""How long and how wide a text embed is, by what a model's configuration says. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT_WIDTHS = (
    "joint_attention_dim",
    "caption_channels",
    "text_dim",
    "text_embed_dim",
    "cap_feat_dim",
    "cross_attention_dim",
)
"""What models call the width of a text embed in their configuration; the first that is there counts."""

_TOKENS = {"sdxl": 77, "sd1x": 77, "kolors": 256, "sd3": 77 + 154, "pixart": 300, "pixart_sigma": 300, "sana": 300}
USUAL_TOKENS = 512


def tokens_of(family: str, limit: object) -> int:
    """How long a padded text embed is, where no cached one tells."""
    if family in _TOKENS:
        return _TOKENS[family]
    try:
        given = int(float(str(limit)))
    except (ValueError, OverflowError):
        return USUAL_TOKENS
    return given if given > 0 else USUAL_TOKENS


def text_width(config: Mapping[str, Any]) -> int:
    found = next((config[key] for key in _TEXT_WIDTHS if config.get(key)), None)
    if isinstance(found, list | tuple):
        found = found[0]
    if found is None:
        raise ValueError(f"the model's configuration names no width of text embeds (one of {', '.join(_TEXT_WIDTHS)})")
    return int(found)


def pooled_width(config: Mapping[str, Any]) -> int:
    if config.get("pooled_projection_dim"):
        return int(config["pooled_projection_dim"])
    together = config.get("projection_class_embeddings_input_dim")
    return int(together) - 6 * int(config.get("addition_time_embed_dim") or 0) if together else 0
