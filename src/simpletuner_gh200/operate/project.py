"""``gh200 init``: a folder with everything a run needs, which ``gh200 train`` takes as it is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.accelerate_file import accelerate_file
from simpletuner_gh200.operate.models import Model
from simpletuner_gh200.plan.machines import MACHINES, this_machine
from simpletuner_gh200.plan.quick import advised
from simpletuner_gh200.units import GIB

_ROOM = 1.5
"""A dataset may grow by half before its ceiling has to be raised."""


@dataclass(frozen=True)
class Wish:
    """What was asked for. ``cpu`` gives settings that also train without a GPU."""

    folder: Path
    model: Model
    data: Path
    nodes: int = 1
    gpus_per_node: int = 1
    steps: int = 1000
    batch: int = 4
    resolution: int | None = None
    cpu: bool = False

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def pixels(self) -> int:
        return self.resolution or self.model.family.resolution


def files(wish: Wish) -> dict[str, str]:
    """Path below the folder -> content. Paths inside are absolute, so that a run may start anywhere."""
    config = fitting(wish, {**training_config(wish), **our_blocks(wish)})
    return {
        "config/config.json": json.dumps(config, indent=2) + "\n",
        "config/datasets.json": json.dumps(dataset_list(wish), indent=2) + "\n",
        "config/accelerate.yaml": accelerate_file(
            nodes=wish.nodes, gpus_per_node=wish.gpus_per_node, blocks=wish.model.family.blocks, cpu=wish.cpu
        ),
    }


def fitting(wish: Wish, config: dict[str, Any]) -> dict[str, Any]:
    """By the plan: for this machine, or for a GH200 where this one has no GPU."""
    if wish.cpu:
        return config
    here = this_machine(output=str(wish.folder))
    return advised(config, here if here.has_device else MACHINES["gh200-96"])


def write(wish: Wish, *, force: bool = False) -> list[Path]:
    """Write the files; refuses, before anything is written, where one is there already."""
    wanted = {wish.folder / name: content for name, content in files(wish).items()}
    there = [str(path) for path in wanted if path.exists()]
    if there and not force:
        raise UsageError(f"already there: {', '.join(there)}", remedy="name another folder, or add --force")
    for path, content in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return list(wanted)


def training_config(wish: Wish) -> dict[str, Any]:
    """SimpleTuner's own keys: a LoRA with few surprises."""
    base = wish.folder.absolute()
    config: dict[str, Any] = {
        "model_family": wish.model.family.name,
        "model_type": "lora",
        "lora_type": "standard",
        "lora_rank": 16,
        "pretrained_model_name_or_path": wish.model.weights,
        "data_backend_config": str(base / "config" / "datasets.json"),
        "output_dir": str(base / "output"),
        "accelerate_config": str(base / "config" / "accelerate.yaml"),
        "num_processes": wish.ranks,
        "num_machines": wish.nodes,
        "optimizer": "adamw_bf16",
        "learning_rate": 1e-4,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": min(100, wish.steps // 10),
        "mixed_precision": "bf16",
        "base_model_precision": "no_change",
        "resolution": wish.pixels,
        "resolution_type": "pixel",
        "train_batch_size": wish.batch,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": True,
        "max_train_steps": wish.steps,
        "num_train_epochs": 0,
        # A set smaller than the ramp's target is repeated instead of refused.
        "allow_dataset_oversubscription": True,
        "checkpoint_step_interval": max(1, wish.steps // 4),
        "checkpoints_total_limit": 3,
        "resume_from_checkpoint": "latest",
        "seed": 42,
        "report_to": "none",
        "disable_benchmark": True,
        "validation_disable": True,
        "caption_dropout_probability": 0.1,
    }
    if wish.model.local and wish.model.family.name == "sdxl":
        config["pretrained_vae_model_name_or_path"] = wish.model.weights
    return {**config, **_sharding(wish), **(_ON_A_CPU if wish.cpu else {})}


_ON_A_CPU: Mapping[str, Any] = {
    "mixed_precision": "no",
    "optimizer": "optimi-adamw",
    "gradient_checkpointing": False,
    "disable_bucket_pruning": True,
}


def _sharding(wish: Wish) -> dict[str, Any]:
    """FSDP2, in SimpleTuner's words; on one rank there is nothing to shard."""
    if wish.ranks == 1 or wish.cpu:
        return {}
    return {
        "fsdp_enable": True,
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_limit_all_gathers": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(wish.model.family.blocks),
        # FSDP wraps what it checkpoints: doing it twice fails.
        "gradient_checkpointing": False,
    }


def our_blocks(wish: Wish) -> dict[str, Any]:
    effective = wish.batch * wish.ranks
    return {
        "cache_config": {
            "vae_cache_type": "unified_memory",
            "text_cache_type": "unified_memory",
            "cache_dir": str(wish.folder.absolute() / "cache" / "gh200"),
            "persistent_cache": True,
        },
        "gh200_optimizations": {
            "enable_uvm_hints": True,
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": effective,
            "target_effective_batch_size": effective * 8,
            "batch_rampup_steps": min(400, max(1, wish.steps)),
        },
    }


def dataset_list(wish: Wish) -> list[dict[str, Any]]:
    base = wish.folder.absolute()
    size, has_captions = _survey(wish.data)
    images = {
        "id": "train_images",
        "type": "in_memory",
        "dataset_type": "image",
        "instance_data_dir": str(wish.data.absolute()),
        "caption_strategy": "textfile" if has_captions else "filename",
        "resolution": wish.pixels,
        "resolution_type": "pixel",
        "minimum_image_size": 0,
        "crop": True,
        "crop_aspect": "square",
        "crop_style": "center",
        "metadata_backend": "discovery",
        "cache_dir_vae": str(base / "cache" / "vae"),
        "in_memory": {"compression": "auto", "memory_limit_gb": max(1, math.ceil(size * _ROOM / GIB))},
    }
    embeds = {
        "id": "text_embeds",
        "type": "local",
        "dataset_type": "text_embeds",
        "default": True,
        "cache_dir": str(base / "cache" / "text"),
    }
    return [images, embeds]


def _survey(folder: Path) -> tuple[int, bool]:
    """(bytes below the folder, whether captions lie beside the images)"""
    if not folder.is_dir():
        raise UsageError(f"--data {folder}: no such folder", remedy="name the folder with your images")
    size, captions = 0, False
    for place, _folders, names in os.walk(folder):
        for name in names:
            captions = captions or name.endswith(".txt")
            size += os.stat(os.path.join(place, name)).st_size
    if not size:
        raise UsageError(f"--data {folder}: no files in it", remedy="name the folder with your images")
    return size, captions
