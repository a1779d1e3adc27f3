"""What the tracing child and a plan both know: the numbers of a step, and the sizes of text embeds. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Counted:
    """Bytes, parameters and floating point operations of one step; additive in the number of alike blocks."""

    parameters: int = 0
    trained: int = 0
    weights: int = 0
    """Bytes of all parameters and buffers."""
    trained_bytes: int = 0
    stepped: int = 0
    """Trained parameters that got a gradient: an optimizer keeps state for no others."""
    gradients: int = 0
    saved: int = 0
    """What autograd keeps between forward and backward, each storage once."""
    forward: int = 0
    """The most that was alive beyond the weights during the forward pass."""
    peak: int = 0
    """The most that was alive beyond the weights during the step, gradients included."""
    flops: int = 0

    def minus(self, other: Counted) -> Counted:
        return Counted(**{key: value - getattr(other, key) for key, value in asdict(self).items()})


# -- text embeds, by what a model's configuration says ----------------------------------------------------

_TEXT_WIDTHS = (
    *("joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cap_feat_dim"),
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
