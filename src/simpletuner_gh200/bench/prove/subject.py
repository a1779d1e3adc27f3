"""What the arms train: the demo's tiny model, or the model of somebody's configuration, for a few steps each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.prove.arms import Arm
from simpletuner_gh200.config.files import locate_training_config
from simpletuner_gh200.config.legacy import OLDER_KEYS
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.demo.project import DemoProject, dataset_list, training_config, write_project_in_subprocess
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.importing import check_import

QUIET = {
    "validation_disable": True,
    "report_to": "none",
    "push_to_hub": False,
    "resume_from_checkpoint": "",
    "disable_benchmark": True,
    "checkpoint_step_interval": 10**6,
    "num_train_epochs": 0,
}
"""What a measured run leaves out; the weights at its end are all that SimpleTuner writes."""

_DROPPED = ("checkpointing_steps", "validation_steps", "validation_step_interval", "datasets")
_REACHES_OUT = (
    *("post_upload_script", "post_checkpoint_script", "disk_low_script", "disk_low_action"),
    *("validation_method", "validation_external_script", "validation_external_background"),
    *("publishing_config", "webhook_config", "webhook_reporting_interval"),
    *("hub_model_id", "push_to_hub_background", "push_checkpoints_to_hub"),
    *("dynamo_cache_export", "dynamo_hub_repo_id"),
)
"""What runs a program of the user's or sends something away: a trial does neither."""

_SHOWN = (
    *("model_family", "model_flavour", "model_type", "optimizer", "mixed_precision"),
    *("train_batch_size", "resolution"),
)


@dataclass(frozen=True)
class Subject:
    """``values``: the training configuration without anything of ours; ``datasets``: its list, all of it on disk."""

    title: str
    values: Mapping[str, Any]
    datasets: list[dict[str, Any]]
    tiny: bool

    @property
    def full(self) -> bool:
        return "lora" not in str(self.values.get("model_type") or "full")

    def to_json(self) -> dict[str, Any]:
        """Nothing of it names a person or a place."""
        return {"title": self.title, **{key: self.values[key] for key in _SHOWN if key in self.values}}

    def write(self, arm: Arm, folder: Path, *, steps: int) -> Path:
        """The arm's configuration in a folder of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        listed = folder / "datasets.json"
        listed.write_text(json.dumps(self.datasets), encoding="utf-8")
        values = {
            **self.values,
            **QUIET,
            **arm.settings,
            "max_train_steps": steps,
            "data_backend_config": str(listed),
            "output_dir": str(folder / "output"),
        }
        if "cache_config" in arm.settings:
            values["cache_config"] = {**arm.settings["cache_config"], "cache_dir": str(folder / "packs")}
        config = folder / "config.json"
        config.write_text(json.dumps(values, indent=2), encoding="utf-8")
        return config


def tiny_subject(folder: Path) -> Subject:
    """A LoRA on the tiny SDXL, made on the spot."""
    project = DemoProject(folder.absolute() / "tiny")
    write_project_in_subprocess(project, {}, {})
    return Subject("a LoRA on a tiny SDXL", training_config(project), dataset_list(project, {}), tiny=True)


def configured_subject(config: Path, environment: Mapping[str, str]) -> Subject:
    """The model and data of a configuration, without its blocks of ours. Raises what is wrong with it, all at once."""
    located = locate_training_config({}, explicit=str(config), env_name=None)
    training = read_training(located, environment, options=check_import().table)
    training.raise_if_bad(here=True)
    mine = (*TRAINING_BLOCKS, *OLDER_KEYS, *_DROPPED, *_REACHES_OUT)
    values = {key: value for key, value in training.values.items() if key not in mine}
    entries = [dict(dataset.entry) for dataset in training.datasets]
    for entry in entries:  # as stock SimpleTuner knows it
        entry.pop("in_memory", None)
        if entry.get("type") == "in_memory":
            entry["type"] = "local"
    if not entries:
        raise UsageError(f"{config} names no datasets", remedy="set data_backend_config")
    family = values.get("model_family") or "unknown family"
    return Subject(f"{family}, {values.get('model_type') or 'full'}", values, entries, tiny=False)
