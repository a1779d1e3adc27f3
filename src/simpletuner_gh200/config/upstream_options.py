"""What has to be known of SimpleTuner's options to read a configuration: its variables, and its defaults.

A release tells both itself (``upstream.option_table``). Where it can't be asked, because it is not installed or does
not import, there is a last resort: what a plan looks at, as the releases that are tested have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class UpstreamOptions(Protocol):
    @property
    def variables(self) -> Mapping[str, str]:
        """Variable of a ``config.env`` -> the option it sets, in one case with the value: ``option=value``."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Option -> its value where nobody sets it; options without one are left out."""


@dataclass(frozen=True)
class _LastResort:
    variables: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


LAST_RESORT: UpstreamOptions = _LastResort(
    variables={
        "ACCELERATE_CONFIG_PATH": "accelerate_config",
        "ACCELERATE_EXTRA_ARGS": "accelerate_extra_args",
        "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
        "DATALOADER_CONFIG": "data_backend_config",
        "MAX_NUM_STEPS": "max_train_steps",
        "MODEL_NAME": "pretrained_model_name_or_path",
        "NUM_EPOCHS": "num_train_epochs",
        "RESUME_CHECKPOINT": "resume_from_checkpoint",
        "TRAINING_NUM_MACHINES": "num_machines",
        "TRAINING_NUM_PROCESSES": "num_processes",
        "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
        **{
            name.upper(): name
            for name in (
                *("base_model_precision", "gradient_accumulation_steps", "mixed_precision", "model_family"),
                *("model_type", "optimizer", "output_dir", "resolution", "resolution_type", "train_batch_size"),
                "use_ema",
            )
        },
    },
    defaults={
        "base_model_precision": "no_change",
        "checkpoints_total_limit": 5,
        "ema_device": "cpu",
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": True,
        "mixed_precision": "bf16",
        "model_type": "full",
        "num_train_epochs": 1,
        "optimizer": "adamw_bf16",
        "resolution": 1024,
        "resolution_type": "pixel_area",
        "train_batch_size": 4,
        "vae_batch_size": 4,
    },
)
