"""The arms of the comparison: what each changes in the configuration, and how its run shows that it was on; and what
they train, the demo's tiny model or the model of somebody's configuration, for a few steps each.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.files import locate_training_config
from simpletuner_gh200.config.legacy import OLDER_KEYS
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.demo.project import DemoProject, dataset_list, training_config, write_project_in_subprocess
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.importing import check_import

Summary = Mapping[str, Any]
"""Of a run, as its first rank leaves it."""

OURS = ("caches", "state", "activations")
"""Features that an arm may have, and every other must not."""


@dataclass(frozen=True)
class Arm:
    name: str
    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Blocks of ours and SimpleTuner's own options."""
    feature: str | None = None
    option: str | None = None
    """Of an offloader of SimpleTuner's: left out where a release has no such option, and where there is no GPU."""

    def verdict(self, summary: Summary) -> tuple[bool, str]:
        """Was it what it says, and what shows it? Anything of ours that an arm has not requested is a failure."""
        features = summary.get("features") or {}
        extra = [name for name in OURS if name != self.feature and features.get(name) == "on"]
        if extra:
            return False, f"also on: {', '.join(extra)}"
        if self.feature is None:
            return True, "nothing of ours was on"
        if features.get(self.feature) != "on":
            return False, f"{self.feature} is {features.get(self.feature, 'not there')}"
        shown = _shown(self.feature, (summary.get("details") or {}).get(self.feature) or {})
        return (True, shown) if shown else (False, f"{self.feature} was on and did nothing")

    def left_out(self, *, options: Collection[str], gpu: bool, family: object = None) -> str | None:
        """Why it is not tried here; None where it is. ``options``: of this release, none where they are unknown."""
        if self.option is None:
            return None
        if options and self.option not in options:
            return f"this SimpleTuner has no {self.option}"
        if not gpu:
            return "needs a GPU"
        if self.option == "musubi_blocks_to_swap" and family in _UNETS:
            return f"{family} has no row of transformer blocks"
        return None


_UNETS = ("sdxl", "sd1x", "sd2x", "kolors", "deepfloyd", "stable_cascade")


def _shown(feature: str, details: Mapping[str, Any]) -> str | None:
    """What of a feature's part of the summary shows that it did its work; None where it did none."""
    if feature == "caches":
        hits = sum(int(table.get("hits") or 0) for table in details.values() if isinstance(table, Mapping))
        return f"{hits} samples came from slabs" if hits else None
    if feature == "state":
        if not details.get("tensors"):
            return None
        return f"{details['tensors']} tensors, {details['bytes']} bytes, by {details['mechanism']}"
    return f"{details['moved']} of {details['saved']} bytes moved" if details.get("moved") else None


def arms(*, tiny: bool, full: bool) -> Sequence[Arm]:
    """In the order of their weight: where time ends early, the last ones go without.

    ``tiny``: nothing is too small to be moved. ``full``: all weights are trained, so that their state has a size.
    """
    unified = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "fill": "start"}
    state = {"use_uvm": True, "uvm_access_pattern": "cpu_first"}
    state |= {"uvm_min_tensor_kb": 0} if tiny or not full else {}
    activations = {"activations": "grace", **({"activation_min_tensor_kb": 0} if tiny else {})}
    moved = {"gh200_optimizations": activations, "gradient_checkpointing": False}
    return (
        Arm("stock", "SimpleTuner as it is"),
        Arm("caches", "unified caches", {"cache_config": unified}, "caches"),
        Arm("state", "optimizer state in Grace", {"gh200_optimizations": state}, "state"),
        Arm("activations", "activations in Grace, none computed again", moved, "activations"),
        Arm("recompute", "SimpleTuner's gradient checkpointing", {"gradient_checkpointing": True}),
        *(_offloader(*row) for row in _OFFLOADERS),
    )


_OFFLOADERS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("optimizer", "optimizer offload (torchao)", {"optimizer_cpu_offload_method": "torchao"}),
    ("activations", "checkpointing with attention offloaded", {"gradient_checkpointing_offload_attention": True}),
    ("groups", "group offload of weights", {"enable_group_offload": True}),
    ("blocks", "swap of eight transformer blocks", {"musubi_blocks_to_swap": 8}),
    ("ramtorch", "RamTorch", {"ramtorch": True}),
)
"""SimpleTuner's own, as far as a release has them: name, title, option. They were never run here: each needs a GPU."""
_BESIDES: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {"optimizer": "torch-adamw"},
    "activations": {"gradient_checkpointing": True},
}
"""Settings besides."""


def _offloader(name: str, title: str, option: Mapping[str, Any]) -> Arm:
    settings = {**_BESIDES.get(name, {}), **option}
    return Arm(f"upstream-{name}", f"SimpleTuner's {title}", settings, option=next(iter(option)))


# -- what they train ---------------------------------------------------------------------------------------------------

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
        """Nothing of it names people or places."""
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
