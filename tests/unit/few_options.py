"""A small option table, as the child process that imports SimpleTuner would hand it out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from simpletuner_gh200.upstream.option_table import TABLES, ModelFamily, Option, OptionTable

_TEXTS = (
    "accelerate_config accelerate_extra_args aws_secret_access_key data_backend_config hub_token output_dir "
    "pretrained_model_name_or_path pretrained_vae_model_name_or_path publishing_config seed tracker_password "
    "validation_prompt webhook_config fsdp_state_dict_type fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap "
    "lora_type lr_scheduler optimizer report_to resolution_type caption_strategy base_model_precision "
    "resume_from_checkpoint model_flavour"
)
_NUMBERS = (
    "batch_size checkpoint_step_interval checkpoints_total_limit gradient_accumulation_steps lora_rank lr_warmup_steps "
    "max_train_steps num_machines num_processes num_train_epochs resolution train_batch_size fsdp_version"
)
_SWITCHES = (
    "allow_dataset_oversubscription disable_benchmark disable_bucket_pruning fsdp_activation_checkpointing fsdp_enable "
    "fsdp_limit_all_gathers fsdp_reshard_after_forward gradient_checkpointing only_instance_prompt validation_disable"
)

_OPTIONS = (
    *(Option(name) for name in _TEXTS.split()),
    *(Option(name, "int") for name in _NUMBERS.split()),
    *(Option(name, "switch", bare=True) for name in _SWITCHES.split()),
    Option("learning_rate", "float"),
    Option("caption_dropout_probability", "float"),
    Option("model_family", choices=("flux", "sd3", "sdxl", "qwen_image"), folded=True),
    Option("model_type", choices=("full", "lora")),
    Option("mixed_precision", choices=("no", "fp16", "bf16", "fp8")),
)

TABLE = OptionTable(
    "9.9",
    {option.name: option for option in _OPTIONS} | {"training_steps": Option("max_train_steps", "int")},
    older_flags=frozenset({"ignore_final_epochs"}),
    other_keys=frozenset({"repeats"}),
    variables={
        "LEARNING_RATE": "learning_rate",
        "MAX_NUM_STEPS": "max_train_steps",
        "MODEL_NAME": "pretrained_model_name_or_path",
        "MODEL_TYPE": "model_type",
    },
    switch_words=frozenset({"true", "false", "1", "0"}),
    families={
        "flux": ModelFamily(
            {"dev": "maker/dev", "kontext": "maker/kontext"},
            "dev",
            ("FluxPipeline",),
            ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        ),
        "qwen_image": ModelFamily({"v1.0": "Qwen/Qwen-Image"}, "v1.0", ("QwenImagePipeline",), ("QwenBlock",)),
        "sdxl": ModelFamily(
            {"base-1.0": "maker/sdxl"}, "base-1.0", ("StableDiffusionXLPipeline",), ("BasicTransformerBlock",)
        ),
        "pixart": ModelFamily({"a": "x/a", "b": "x/b"}, "b", ("PixArtPipeline",), ("PixBlock", "PatchEmbed")),
        "wan": ModelFamily({"t2v": "wan/t2v"}, "t2v", ("WanPipeline",), ("WanBlock",), "video"),
    },
    dataset_words=frozenset({"id", "type", "dataset_type", "instance_data_dir", "caption_strategy", "cache_dir"}),
)


def maker_of(folder: Path, table: OptionTable = TABLE) -> tuple[str, ...]:
    """The command of a child that prints the table, after some noise as SimpleTuner makes it."""
    path = folder / "table.json"
    path.write_text(json.dumps({"cause": None, "options": TABLES.dump_python(table, mode="json")}), encoding="utf-8")
    path.chmod(0o644)
    return (sys.executable, "-S", "-c", f"print('noise'); print(open({str(path)!r}).read())")
