"""The demo's project folder: a real SDXL of a few megabytes, images, dataset list and training configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import RunFailed

IMAGE_SIDE = 96
_TEXT_WIDTH = 32
_SEED = 1234


@dataclass(frozen=True)
class DemoProject:
    """Where everything of one small project lives."""

    folder: Path
    steps: int = 24

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def images(self) -> Path:
        return self.folder / "images"

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def config(self) -> Path:
        return self.folder / "config" / "config.json"

    @property
    def datasets(self) -> Path:
        return self.folder / "config" / "datasets.json"


def write_project(project: DemoProject, *, blocks: dict[str, Any], dataset: dict[str, Any]) -> None:
    """Write the project; ``blocks`` go into the training configuration, ``dataset`` into the image entry."""
    write_tiny_sdxl(project.model)
    write_tiny_images(project.images)
    project.config.parent.mkdir(parents=True, exist_ok=True)
    project.datasets.write_text(json.dumps(dataset_list(project, dataset), indent=2), encoding="utf-8")
    project.config.write_text(json.dumps({**training_config(project), **blocks}, indent=2), encoding="utf-8")


def write_project_in_subprocess(project: DemoProject, blocks: dict[str, Any], dataset: dict[str, Any]) -> None:
    write_model_in_subprocess(project.model)
    write_project(project, blocks=blocks, dataset=dataset)


def write_model_in_subprocess(folder: Path, channels: tuple[int, int] = (16, 32)) -> Path:
    """The tiny model, once, by a process of its own: torch and diffusers stay out of this one."""
    if not (folder / "model_index.json").is_file():
        code = f"import sys, pathlib, {__name__} as here; here.write_tiny_sdxl(pathlib.Path(sys.argv[1]), {channels})"
        made = subprocess.run([sys.executable, "-c", code, str(folder)], text=True, capture_output=True)
        if made.returncode:
            raise RunFailed(f"the tiny model could not be made:\n{made.stderr[-2000:]}")
    return folder


def training_config(project: DemoProject) -> dict[str, Any]:
    """A LoRA on the tiny SDXL that trains in seconds on a CPU."""
    return {
        "model_family": "sdxl",
        "model_type": "lora",
        "lora_type": "standard",
        "lora_rank": 4,
        "pretrained_model_name_or_path": str(project.model),
        "pretrained_vae_model_name_or_path": str(project.model),
        "data_backend_config": str(project.datasets),
        "output_dir": str(project.output),
        "optimizer": "optimi-adamw",
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "mixed_precision": "no",
        "base_model_precision": "no_change",
        "resolution": 64,
        "resolution_type": "pixel",
        "minimum_image_size": 0,
        "train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_train_steps": project.steps,
        "num_train_epochs": 0,
        "checkpoint_step_interval": max(1, project.steps // 2),
        "checkpoints_total_limit": 2,
        "seed": 42,
        "report_to": "none",
        "disable_benchmark": True,
        "disable_bucket_pruning": True,
        "validation_disable": True,
        "gradient_checkpointing": False,
        "caption_dropout_probability": 0.1,
        "resume_from_checkpoint": "latest",
    }


def dataset_list(project: DemoProject, dataset: dict[str, Any]) -> list[dict[str, Any]]:
    images = {
        "id": "tiny-images",
        "type": "local",
        "dataset_type": "image",
        "instance_data_dir": str(project.images),
        "caption_strategy": "textfile",
        "resolution": 64,
        "resolution_type": "pixel",
        "minimum_image_size": 0,
        "cache_dir_vae": str(project.folder / "cache" / "vae"),
        "crop": True,
        "crop_aspect": "square",
        "crop_style": "center",
        "metadata_backend": "discovery",
        "repeats": 0,
        **dataset,
    }
    embeds = {
        "id": "tiny-text-embeds",
        "type": "local",
        "dataset_type": "text_embeds",
        "default": True,
        "cache_dir": str(project.folder / "cache" / "text"),
    }
    return [images, embeds]


def write_tiny_images(folder: Path, *, count: int = 24) -> None:
    """Plain pictures with captions, no two alike, the same bytes every time; files that exist are left alone."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = folder / f"image_{number:06d}.png"
        if not path.is_file():
            colour = (number % 256, number // 256 % 256, number * 7 % 256)
            # The image last: a caption without an image is harmless, an image without a caption is not.
            path.with_suffix(".txt").write_text(f"a plain picture, number {number}", encoding="utf-8")
            Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), colour).save(path)


def write_tiny_sdxl(folder: Path, channels: tuple[int, int] = (16, 32)) -> None:
    """Write the pipeline to ``folder`` unless a complete one is there; ``channels`` say how wide its UNet is."""
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
        unet=tiny_unet(channels),
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


def tiny_unet(channels: tuple[int, int] = (16, 32)) -> Any:
    """An SDXL UNet of two narrow blocks."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=channels,
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
