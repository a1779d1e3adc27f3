"""``gh200 init``: a folder with everything a run needs, which ``gh200 train`` takes as it is.

What is up to us is decided in ``choices.py``, and by the plan: settings with the reason for each. The files are those
settings over a base that every project shares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.datasets import Survey, shorter_edges, survey
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.choices import Decision, Wish, decide
from simpletuner_gh200.operate.slurm import LOGS, SCRIPT, train_sbatch
from simpletuner_gh200.plan.machines import MACHINES, this_machine
from simpletuner_gh200.plan.planning import too_much
from simpletuner_gh200.units import counted


@dataclass(frozen=True)
class Project:
    """A wish, what its data folder holds, and what was decided: everything the files are made from."""

    wish: Wish
    data: Survey
    decisions: tuple[Decision, ...]
    doubt: str | None = None
    """Why the plan finds that it won't fit, whatever was decided."""


def plan_project(wish: Wish) -> Project:
    """Look at the data and decide; UsageError where there is nothing to train on."""
    found = _survey(wish.data)
    decisions = tuple(decide(wish, found))
    return Project(wish, found, decisions, None if wish.cpu else _doubt(wish, decisions))


def _settings(wish: Wish, decisions: Sequence[Decision]) -> dict[str, Any]:
    config = training_config(wish)
    for decision in decisions:
        for key, value in decision.training.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, Mapping) else value
    return config


def _doubt(wish: Wish, decisions: Sequence[Decision]) -> str | None:
    """By the plan: for this machine, or for a GH200 where this one has no GPU."""
    here = this_machine(output=str(wish.folder))
    machine = here if here.has_device else MACHINES["gh200-96"]
    why = too_much(_settings(wish, decisions), machine)
    return f"by `gh200 plan` this does not fit on {machine.name}: {why}" if why else None


def files(project: Project) -> dict[str, str]:
    """Path below the folder -> content. Paths inside are absolute, so that a run may start anywhere."""
    wish = project.wish
    config = _settings(wish, project.decisions)
    script = {SCRIPT: train_sbatch(wish)} if wish.slurm else {}
    return {
        "config/config.json": json.dumps(config, indent=2) + "\n",
        "config/datasets.json": json.dumps(dataset_list(project), indent=2) + "\n",
        "config/accelerate.yaml": accelerate_file(
            nodes=wish.nodes,
            gpus_per_node=wish.gpus_per_node,
            blocks=wish.model.blocks if wish.sharded else (),
            cpu=wish.cpu,
        ),
        **script,
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
    if project.wish.slurm:
        (project.wish.folder / LOGS).mkdir(exist_ok=True)  # Slurm makes no folder for its logs
    return list(wanted)


# -- what every project shares -------------------------------------------------------------------------


def training_config(wish: Wish) -> dict[str, Any]:
    """SimpleTuner's own keys, with few surprises."""
    base = wish.folder.absolute()
    config: dict[str, Any] = {
        "model_family": wish.model.family,
        "pretrained_model_name_or_path": wish.model.weights,
        "data_backend_config": str(base / "config" / "datasets.json"),
        "output_dir": str(base / "output"),
        "accelerate_config": str(base / "config" / "accelerate.yaml"),
        "num_processes": wish.ranks,
        "num_machines": wish.nodes,
        "lr_scheduler": "constant_with_warmup",
        "mixed_precision": "bf16",
        "base_model_precision": "no_change",
        "train_batch_size": wish.batch,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 0,
        # A set smaller than a batch, or than a ramp's target, is repeated instead of refused.
        "allow_dataset_oversubscription": True,
        "checkpoints_total_limit": 3,
        "resume_from_checkpoint": "latest",
        "seed": 42,
        "report_to": "none",
        "disable_benchmark": True,
        "caption_dropout_probability": 0.1,
    }
    if wish.model.local and wish.model.family == "sdxl":
        config["pretrained_vae_model_name_or_path"] = wish.model.weights
    if wish.model.flavour:
        config["model_flavour"] = wish.model.flavour
    return {**config, **(_ON_A_CPU if wish.cpu else {})}


_ON_A_CPU: Mapping[str, Any] = {"mixed_precision": "no", "disable_bucket_pruning": True}


def dataset_list(project: Project) -> list[dict[str, Any]]:
    wish = project.wish
    base = wish.folder.absolute()
    images = {
        "id": "train_images",
        "type": "in_memory",
        "dataset_type": "image",
        "instance_data_dir": str(wish.data.absolute()),
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
        what = f"{counted(found.files, 'file')} in it, none of them an image" if found.files else "no files in it"
        raise UsageError(f"--data {folder}: {what}", remedy="name the folder with your images")
    return replace(found, edges=shorter_edges(folder))


# -- the file for ``accelerate launch``: one process or several, on one node or more, data parallel or FSDP2 -----------

_HEADER = """\
# For accelerate launch, made by gh200 init. {what}
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {kind}
downcast_bf16: 'no'
enable_cpu_affinity: {affinity}
machine_rank: 0
main_training_function: main
mixed_precision: {precision}
num_machines: {nodes}
num_processes: {ranks}
rdzv_backend: static
same_network: true
use_cpu: {cpu}
"""

_SEVERAL_NODES = """\
# Every node starts the same way, with its own rank, and all name the first one:
#   ACCELERATE_EXTRA_ARGS="--machine_rank=1 --main_process_ip=FIRST_NODE" gh200 train --config ...
main_process_port: 29500
"""

# limit_all_gathers has no flag in accelerate's launcher, and FSDP2 limits them by itself: the training configuration
# says it, as fsdp_limit_all_gathers.
_FSDP2 = """\
# These settings trained all weights of a tiny Flux on two CPU ranks over gloo. GPUs and NCCL were never tried.
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {blocks}
  fsdp_reshard_after_forward: true
  fsdp_offload_params: false
  fsdp_cpu_ram_efficient_loading: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


def accelerate_file(*, nodes: int, gpus_per_node: int, blocks: Sequence[str] = (), cpu: bool = False) -> str:
    """The content of the file. ``blocks`` are the classes that FSDP wraps; without them every rank holds the whole."""
    ranks = nodes * gpus_per_node
    text = _HEADER.format(
        what=_described(nodes, gpus_per_node, sharded=bool(blocks)),
        kind=_engine(ranks, sharded=bool(blocks), cpu=cpu),
        # Keeps each rank on the cores, and so the memory, next to its own GPU.
        affinity=str(gpus_per_node > 1 and not cpu).lower(),
        precision="'no'" if cpu else "bf16",
        nodes=nodes,
        ranks=ranks,
        cpu=str(cpu).lower(),
    )
    if nodes > 1:
        text += _SEVERAL_NODES
    return text + _FSDP2.format(blocks=",".join(blocks)) if blocks else text


def _engine(ranks: int, *, sharded: bool, cpu: bool) -> str:
    if ranks == 1:
        return "'NO'"
    return "FSDP" if sharded else "MULTI_CPU" if cpu else "MULTI_GPU"


def _described(nodes: int, gpus_per_node: int, *, sharded: bool) -> str:
    machines = "one node" if nodes == 1 else f"{nodes} nodes"
    devices = "one process" if gpus_per_node == 1 else f"{gpus_per_node} processes"
    return f"{machines}, {devices} each" + (", sharded by FSDP2." if sharded else ".")
