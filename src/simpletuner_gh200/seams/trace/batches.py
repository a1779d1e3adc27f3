"""A batch as SimpleTuner's collate would hand it over, of the right shapes and no meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

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
    return int(str(limit)) if limit else USUAL_TOKENS


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


def latent_shape(foundation: Any, request: Mapping[str, Any]) -> tuple[int, ...]:
    """Batch, channels and what the request says of the rest; a film has its frames in between."""
    return (int(request["batch"]), int(foundation.LATENT_CHANNEL_COUNT), *request["latent"])


def make(latents: Sequence[int], *, tokens: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Real tensors, zeros: they are small, and what prepares a batch may look at their values."""
    size = latents[0]
    embeds = torch.zeros(size, tokens, text_width(config))
    pooled = pooled_width(config)
    mask = torch.ones(size, tokens)
    text = {"prompt_embeds": embeds, "attention_masks": mask}
    if pooled:
        text["pooled_prompt_embeds"] = torch.zeros(size, pooled)
    height, width = latents[-2:]
    return {
        "latent_batch": torch.zeros(*latents),
        "latent_metadata": None,
        "prompts": [""] * size,
        "text_encoder_output": text,
        "prompt_embeds": embeds,
        "add_text_embeds": text.get("pooled_prompt_embeds"),
        "batch_time_ids": torch.tensor([[height * 8.0, width * 8.0, 0, 0, height * 8.0, width * 8.0]] * size),
        "conditioning_pixel_values": None,
        "conditioning_latents": None,
        "conditioning_image_embeds": None,
        "encoder_attention_mask": mask,
        "is_regularisation_data": False,
        "is_i2v_data": False,
        "conditioning_type": None,
        "loss_mask_type": None,
    }
