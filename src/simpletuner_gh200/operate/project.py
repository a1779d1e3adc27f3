"""``gh200 init``: a folder with everything a run needs, which ``gh200 train`` takes as it is.

What is up to us is decided in one place, ``decide``: settings with the reason for each, from the wish and from what
lies in the data folder. The files are those settings over a base that every project shares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.folders import Survey, survey
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.accelerate_file import accelerate_file
from simpletuner_gh200.operate.models import Model
from simpletuner_gh200.plan.machines import MACHINES, this_machine
from simpletuner_gh200.plan.quick import advised
from simpletuner_gh200.units import GIB, format_bytes

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


@dataclass(frozen=True)
class Decision:
    """Settings that belong together, and why they are as they are. ``why`` is said to people."""

    what: str
    why: str
    training: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the training configuration."""
    dataset: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the image dataset's entry."""


@dataclass(frozen=True)
class Project:
    """A wish, what its data folder holds, and what was decided: everything the files are made from."""

    wish: Wish
    data: Survey
    decisions: tuple[Decision, ...]


def plan_project(wish: Wish) -> Project:
    """Look at the data and decide; UsageError where there is nothing to train on."""
    found = _survey(wish.data)
    decisions = [*decide(wish, found)]
    decisions += _fitting(wish, _settings(wish, decisions))
    return Project(wish, found, tuple(decisions))


def _settings(wish: Wish, decisions: Sequence[Decision]) -> dict[str, Any]:
    config = training_config(wish)
    for decision in decisions:
        config.update(decision.training)
    return config


def _fitting(wish: Wish, config: dict[str, Any]) -> Iterator[Decision]:
    """By the plan: for this machine, or for a GH200 where this one has no GPU."""
    if wish.cpu:
        return
    here = this_machine(output=str(wish.folder))
    machine = here if here.has_device else MACHINES["gh200-96"]
    changed = {key: value for key, value in advised(config, machine).items() if config.get(key) != value}
    if changed:
        what = ", ".join(f"{key} {json.dumps(value)}" for key, value in changed.items())
        yield Decision(what, f"by `gh200 plan`, the best that fits on {machine.name}", training=changed)


def files(project: Project) -> dict[str, str]:
    """Path below the folder -> content. Paths inside are absolute, so that a run may start anywhere."""
    wish = project.wish
    config = _settings(wish, project.decisions)
    return {
        "config/config.json": json.dumps(config, indent=2) + "\n",
        "config/datasets.json": json.dumps(dataset_list(project), indent=2) + "\n",
        "config/accelerate.yaml": accelerate_file(
            nodes=wish.nodes, gpus_per_node=wish.gpus_per_node, blocks=wish.model.family.blocks, cpu=wish.cpu
        ),
    }


def write(project: Project, *, force: bool = False) -> list[Path]:
    """Write the files; refuses, before anything is written, where one is there already."""
    wanted = {project.wish.folder / name: content for name, content in files(project).items()}
    there = [str(path) for path in wanted if path.exists()]
    if there and not force:
        raise UsageError(f"already there: {', '.join(there)}", remedy="name another folder, or add --force")
    for path, content in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return list(wanted)


# -- what is up to us ----------------------------------------------------------------------------------


def decide(wish: Wish, data: Survey) -> Iterator[Decision]:
    """Every choice that the wish leaves open, with its reason. Pure."""
    yield _captions(data)
    yield Decision(
        "square crops from the centre",
        "all images then share one shape, so that every batch is full and none is left out; "
        'set "crop": false in datasets.json to keep whole pictures, sorted by shape',
        dataset={"crop": True, "crop_aspect": "square", "crop_style": "center"},
    )
    yield Decision(
        "no validation pictures",
        "they cost time at every checkpoint and need a prompt of yours; to have them, set validation_disable to false "
        "and validation_prompt to your words in config.json",
        training={"validation_disable": True},
    )
    limit = max(1, math.ceil(data.bytes * _ROOM / GIB))
    yield Decision(
        f"the dataset held in memory, {limit} GiB at most",
        f"it has {format_bytes(data.bytes)} now, and room to grow by half",
        dataset={"in_memory": {"compression": "auto", "memory_limit_gb": limit}},
    )
    yield Decision(
        "latents and text embeds cached in memory the GPU reaches",
        "no file is opened for a sample, and the next start takes them from packs",
        training={
            "cache_config": {
                "vae_cache_type": "unified_memory",
                "text_cache_type": "unified_memory",
                "cache_dir": str(wish.folder.absolute() / "cache" / "gh200"),
                "persistent_cache": True,
            }
        },
    )
    yield _ramp(wish)
    yield _checkpointing(wish)


def _captions(data: Survey) -> Decision:
    if data.captioned == data.samples and data.captioned:
        return Decision("captions from .txt files", "each image has one beside it", dataset=_caption_source("textfile"))
    if data.captioned:
        why = (
            f"only {data.captioned} of {data.samples} images have a .txt beside them, and SimpleTuner stops at the "
            "first without; write the others and set caption_strategy to textfile"
        )
        return Decision("file names as captions", why, dataset=_caption_source("filename"))
    return Decision("file names as captions", "no .txt lies beside an image", dataset=_caption_source("filename"))


def _caption_source(strategy: str) -> dict[str, Any]:
    return {"caption_strategy": strategy}


def _ramp(wish: Wish) -> Decision:
    first = wish.batch * wish.ranks
    length = min(400, max(1, wish.steps))
    return Decision(
        f"an effective batch that grows from {first} to {first * 8} over {length} micro-batches",
        "small batches learn fast at first, large ones are steady later; batch_rampup_steps counts micro-batches per "
        "rank, not optimizer steps",
        training={
            "gh200_optimizations": {
                "enable_uvm_hints": True,
                "enable_batch_size_rampup": True,
                "initial_effective_batch_size": first,
                "target_effective_batch_size": first * 8,
                "batch_rampup_steps": length,
            }
        },
    )


def _checkpointing(wish: Wish) -> Decision:
    """Recomputing activations, or not. FSDP wraps what it checkpoints: doing it twice fails."""
    if wish.cpu:
        return Decision(
            "activations kept", "a model small enough for a CPU has room for them", {"gradient_checkpointing": False}
        )
    if wish.ranks > 1:
        return Decision(
            f"weights sharded over {wish.ranks} GPUs",
            "FSDP2, which also computes activations again in the backward pass instead of keeping them",
            _sharding(wish),
        )
    return Decision(
        "activations computed again in the backward pass",
        "it fits every model and resolution here; where memory is left, gradient_checkpointing false is faster",
        {"gradient_checkpointing": True},
    )


def _sharding(wish: Wish) -> dict[str, Any]:
    """FSDP2, in SimpleTuner's words."""
    return {
        "fsdp_enable": True,
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_limit_all_gathers": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(wish.model.family.blocks),
        "gradient_checkpointing": False,
    }


# -- what every project shares -------------------------------------------------------------------------


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
        "caption_dropout_probability": 0.1,
    }
    if wish.model.local and wish.model.family.name == "sdxl":
        config["pretrained_vae_model_name_or_path"] = wish.model.weights
    if wish.model.flavour:
        config["model_flavour"] = wish.model.flavour
    return {**config, **(_ON_A_CPU if wish.cpu else {})}


_ON_A_CPU: Mapping[str, Any] = {
    "mixed_precision": "no",
    "optimizer": "optimi-adamw",
    "disable_bucket_pruning": True,
}


def dataset_list(project: Project) -> list[dict[str, Any]]:
    wish = project.wish
    base = wish.folder.absolute()
    images = {
        "id": "train_images",
        "type": "in_memory",
        "dataset_type": "image",
        "instance_data_dir": str(wish.data.absolute()),
        "resolution": wish.pixels,
        "resolution_type": "pixel",
        "minimum_image_size": 0,
        "metadata_backend": "discovery",
        "cache_dir_vae": str(base / "cache" / "vae"),
    }
    for decision in project.decisions:
        images.update(decision.dataset)
    embeds = {
        "id": "text_embeds",
        "type": "local",
        "dataset_type": "text_embeds",
        "default": True,
        "cache_dir": str(base / "cache" / "text"),
    }
    return [images, embeds]


def _survey(folder: Path) -> Survey:
    if not folder.is_dir():
        raise UsageError(f"--data {folder}: no such folder", remedy="name the folder with your images")
    found = survey(folder, sizes=True)
    if not found.samples:
        what = f"{found.files} files in it, none of them an image" if found.files else "no files in it"
        raise UsageError(f"--data {folder}: {what}", remedy="name the folder with your images")
    return found
