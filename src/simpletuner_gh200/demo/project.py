"""The demo's project folder: model, images, dataset list and training configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.demo.tiny_data import write_tiny_images
from simpletuner_gh200.demo.tiny_model import write_tiny_sdxl


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
