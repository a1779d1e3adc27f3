"""A real SDXL pipeline of a few megabytes, with random weights, made offline from configuration classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TEXT_WIDTH = 32
_SEED = 1234


def write_tiny_sdxl(folder: Path) -> None:
    """Write the pipeline to ``folder`` unless a complete one is there."""
    if (folder / "model_index.json").is_file():
        return
    import torch
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline

    torch.manual_seed(_SEED)
    pipeline = StableDiffusionXLPipeline(
        vae=AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=64,
        ),
        unet=tiny_unet(),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
        text_encoder=clip_text_encoder(with_projection=False),
        text_encoder_2=clip_text_encoder(with_projection=True),
        tokenizer=clip_tokenizer(folder / "tokenizer"),
        tokenizer_2=clip_tokenizer(folder / "tokenizer_2"),
    )
    pipeline.save_pretrained(folder)


def tiny_unet() -> Any:
    """An SDXL UNet of two narrow blocks."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        transformer_layers_per_block=(1, 1),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=_TEXT_WIDTH + 6 * 8,
        cross_attention_dim=2 * _TEXT_WIDTH,
    )


def clip_text_encoder(*, with_projection: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=_TEXT_WIDTH,
        projection_dim=_TEXT_WIDTH,
        intermediate_size=2 * _TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        hidden_act="gelu",
        bos_token_id=len(_vocabulary()) - 2,
        eos_token_id=len(_vocabulary()) - 1,
    )
    return (CLIPTextModelWithProjection if with_projection else CLIPTextModel)(config)


def _vocabulary() -> dict[str, int]:
    """A byte-level CLIP vocabulary without merges: each byte, each byte at a word's end, and two specials."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = [chr(value) for value in printable]
    characters += [chr(256 + extra) for extra in range(256 - len(printable))]
    tokens = [*characters, *(f"{character}</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    return {token: number for number, token in enumerate(tokens)}


def clip_tokenizer(folder: Path) -> Any:
    """transformers 5 takes the vocabulary itself, earlier ones its files."""
    import transformers

    if int(transformers.__version__.split(".")[0]) >= 5:
        return transformers.CLIPTokenizer(vocab=_vocabulary(), merges=[])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(_vocabulary()), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
