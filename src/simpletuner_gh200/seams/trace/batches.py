"""A batch as SimpleTuner's collate would hand it over, of the right shapes and no meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from simpletuner_gh200.seams.trace.counted import pooled_width, text_width


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
