"""The demo's project folder: model, images, dataset list and training configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.demo.tiny_model import write_tiny_sdxl

_COLOURS = {"red": (220, 40, 40), "green": (40, 180, 70), "blue": (40, 80, 220), "yellow": (230, 210, 50)}
_SHAPES = ("circle", "square", "stripe")


@dataclass(frozen=True)
class Project:
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


def write_project(project: Project, *, blocks: dict[str, Any], dataset: dict[str, Any]) -> None:
    """Write the project; ``blocks`` go into the training configuration, ``dataset`` into the image entry."""
    write_tiny_sdxl(project.model)
    write_tiny_images(project.images)
    project.config.parent.mkdir(parents=True, exist_ok=True)
    project.datasets.write_text(json.dumps(dataset_list(project, dataset), indent=2), encoding="utf-8")
    project.config.write_text(json.dumps({**training_config(project), **blocks}, indent=2), encoding="utf-8")


def training_config(project: Project) -> dict[str, Any]:
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


def dataset_list(project: Project, dataset: dict[str, Any]) -> list[dict[str, Any]]:
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


def write_tiny_images(folder: Path, *, count: int = 24, size: int = 96) -> None:
    """Write ``count`` captioned images to ``folder``, the same bytes every time; files that exist are left alone."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    names = list(_COLOURS)
    for number in range(count):
        path = folder / f"image_{number:03d}.png"
        if path.is_file():
            continue
        colour, shape = names[number % len(names)], _SHAPES[number % len(_SHAPES)]
        image = Image.new("RGB", (size, size), (250 - 5 * number, 245, 240))
        draw = ImageDraw.Draw(image)
        edge = 12 + number
        if shape == "circle":
            draw.ellipse((edge, edge, size - edge, size - edge), fill=_COLOURS[colour])
        elif shape == "square":
            draw.rectangle((edge, edge, size - edge, size - edge), fill=_COLOURS[colour])
        else:
            draw.rectangle((0, size // 2 - 8, size, size // 2 + 8), fill=_COLOURS[colour])
        # The image last: a caption without an image is harmless, an image without a caption is not.
        path.with_suffix(".txt").write_text(f"a {colour} {shape}, number {number}", encoding="utf-8")
        image.save(path)
