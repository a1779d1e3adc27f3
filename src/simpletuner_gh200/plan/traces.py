"""What one training step keeps and peaks at, as traced in a child process, and remembered by the request.

The key is a digest of the request: model configuration, shape, SimpleTuner's options that can matter, the packages that
answer, and the text of the tracing code. So there is nothing to invalidate, and a plan of a model that was
traced before needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import SWITCH, for_child
from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.seams import trace as tracing
from simpletuner_gh200.seams.trace.counted import Counted
from simpletuner_gh200.telemetry.redact import names_secret
from simpletuner_gh200.upstream import user_cache
from simpletuner_gh200.upstream.source import installed_version

_KIND = "traces"
"""In the user's cache."""

_PACKAGES = ("simpletuner", "torch", "diffusers", "transformers", "peft", "accelerate")

_NO_INFLUENCE = """
output_dir data_backend_config accelerate_config accelerate_extra_args num_processes num_machines
max_train_steps num_train_epochs learning_rate lr_scheduler lr_warmup_steps lr_end seed checkpoint_step_interval
checkpointing_steps checkpoints_total_limit resume_from_checkpoint report_to tracker_project_name
tracker_run_name push_to_hub hub_model_id validation_disable validation_prompt validation_steps
validation_step_interval validation_resolution validation_guidance num_validation_images disable_benchmark
caption_dropout_probability resolution resolution_type minimum_image_size gradient_accumulation_steps
train_batch_size vae_batch_size cache_dir cache_dir_text cache_dir_vae use_ema ema_device ema_decay
pretrained_model_name_or_path pretrained_vae_model_name_or_path pretrained_transformer_model_name_or_path
pretrained_unet_model_name_or_path allow_dataset_oversubscription delete_problematic_images
disable_bucket_pruning logging_dir webhook_config optimizer optimizer_config fsdp_enable fsdp_version
fsdp_reshard_after_forward fsdp_activation_checkpointing fsdp_limit_all_gathers fsdp_state_dict_type
fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap base_model_precision deepspeed_config uniform_schedule
max_grad_norm
"""
NOT_NEEDED = "not/needed"
"""The repository that a trace names, since no weights are read."""
REMEMBERED_FAILURE = 24 * 3600
"""Seconds after which what could not be traced is tried again: a disk or memory may have been full."""

_WITHOUT_INFLUENCE = frozenset(_NO_INFLUENCE.split())
"""Options that change no size of a step; without them the same model is traced once for many runs."""


@dataclass(frozen=True)
class Stack:
    """So many alike blocks, and what each adds."""

    count: int
    each: Counted
    rows: Mapping[int, int] = field(default_factory=dict)
    """Of one block, as of a trace."""


@dataclass(frozen=True)
class Trace:
    """A step with two blocks of each stack, and the stacks."""

    base: Counted
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    rows: Mapping[int, int] = field(default_factory=dict)
    """First dimension of parameters -> bytes of one row of all that have it; empty in older traces."""

    @property
    def whole(self) -> Counted:
        totals = dict(vars(self.base))
        for stack in self.stacks.values():
            for name, value in vars(stack.each).items():
                totals[name] += value * (stack.count - 2)
        return Counted(**totals)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Trace:
        stacks = {
            name: Stack(stack["count"], Counted(**stack["each"]), _rows(stack.get("rows", {})))
            for name, stack in found["stacks"].items()
        }
        return cls(Counted(**found["base"]), stacks, _rows(found.get("rows", {})))

    @property
    def all_rows(self) -> Mapping[int, int]:
        totals = dict(self.rows)
        for stack in self.stacks.values():
            for length, size in stack.rows.items():
                totals[length] = totals.get(length, 0) + size * (stack.count - 2)
        return totals


def _rows(found: Mapping[str, int]) -> Mapping[int, int]:
    """JSON has no whole numbers for keys."""
    return {int(length): size for length, size in found.items()}


def step_request(
    options: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    batch: int,
    latent: Sequence[int],
    checkpointing: bool,
    like: str = "hopper",
    tokens: int | None = None,
) -> dict[str, Any]:
    """A request to the child for one step. ``latent``: (frames,) height, width; ``like``: hopper or cpu."""
    kept = {key: value for key, value in options.items() if key not in _WITHOUT_INFLUENCE and not names_secret(key)}
    neutral = {
        "pretrained_model_name_or_path": NOT_NEEDED,
        "optimizer": "torch-adamw",
        "lr_scheduler": "constant",
        "max_train_steps": 1,
        "num_train_epochs": 0,
        "train_batch_size": batch,
        "base_model_precision": "no_change",
        "gradient_checkpointing": checkpointing,
    }
    return {
        "kind": "step",
        "options": {**kept, **neutral},
        "model": {key: value for key, value in model.items() if key not in ("_name_or_path", "_diffusers_version")},
        "batch": batch,
        "latent": list(latent),
        "tokens": tokens,
        "like": like,
    }


def remembered(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer, if there was one before; an ``error`` is one for a day."""
    found = user_cache.load(_KIND, _entry(request))
    if not isinstance(found, dict) or time.time() - found.get("failed_at", time.time()) > REMEMBERED_FAILURE:
        return None
    return found


def ask(requests: Sequence[Mapping[str, Any]], *, timeout: float = 600) -> list[dict[str, Any]]:
    """An answer to each: remembered, or from one child for all that are not. An answer may be an ``error``."""
    answers = {_entry(request): remembered(request) for request in requests}
    missing = {_entry(request): request for request in requests if answers[_entry(request)] is None}
    fresh = _run_child(list(missing.values()), timeout) if missing else []
    for entry, found in zip(missing, fresh, strict=True):
        answers[entry] = {**found, "failed_at": time.time()} if "error" in found else found
        _store(missing[entry], answers[entry] or {})
    return [answers[_entry(request)] or {} for request in requests]


def _run_child(requests: Sequence[Mapping[str, Any]], timeout: float) -> list[dict[str, Any]]:
    quiet = {"HF_HUB_OFFLINE": "1", "SIMPLETUNER_LOG_LEVEL": "ERROR", SWITCH: "0"}
    on_cpu = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = for_child({**quiet, **on_cpu}, without=(*ranks, "SIMPLETUNER_SKIP_TORCH"))
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    command = [sys.executable, "-m", "simpletuner_gh200.seams.trace"]
    try:
        child = subprocess.run(
            command, input=lines, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"tracing took more than {timeout:.0f} s", remedy="plan without it: --no-trace") from None
    answers = child.stdout.splitlines()
    if len(answers) != len(requests):
        last = child.stderr.strip().splitlines()[-1:] or ["without a reason"]
        raise RunFailed(f"tracing ended early: {last[0]}", remedy="plan without it: --no-trace")
    return [json.loads(line) for line in answers]


def _entry(request: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(_context().encode(), digest_size=20)
    digest.update(json.dumps(request, sort_keys=True, default=str).encode())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _context() -> str:
    """Versions, and our own side of the question."""
    versions = [f"{name} {installed_version(name)}" for name in _PACKAGES]
    texts = [
        path.read_text(encoding="utf-8") for folder in tracing.__path__ for path in sorted(Path(folder).glob("*.py"))
    ]
    return "\n".join([*versions, *texts])


def _store(request: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    user_cache.store(_KIND, _entry(request), found)
