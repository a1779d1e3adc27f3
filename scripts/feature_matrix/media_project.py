"""What the tiny video and audio projects share: a tokenizer of letters, the text cache, a training configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXT_WIDTH = 32
STEPS = 2
UNIFIED = {"cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "fill": "start"}}
"""Filled before the first step: two steps are over sooner than a background fill."""


def write_tokenizer(folder: Path) -> int:
    """One token per letter, and one at the end, so that no text is empty; returns how many there are."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    from tokenizers.pre_tokenizers import Metaspace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((chr(c), -3.0) for c in range(33, 127))]
    letters = Tokenizer(Unigram(vocabulary, unk_id=2))
    letters.pre_tokenizer = Metaspace()
    letters.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    specials = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=letters, **specials).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "tokenizer_class": "T5TokenizerFast", "extra_ids": 0}
    path.write_text(json.dumps(config), encoding="utf-8")
    return len(vocabulary)


def text_embeds(folder: Path) -> dict[str, Any]:
    entry = {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True}
    return {**entry, "cache_dir": str(folder / "cache" / "text")}


def training(folder: Path, **of_the_family: Any) -> dict[str, Any]:
    """A LoRA of rank 4, a few steps in full precision, nothing validated."""
    return {
        "model_type": "lora",
        "lora_type": "standard",
        "lora_rank": 4,
        "pretrained_model_name_or_path": str(folder / "model"),
        "data_backend_config": str(folder / "datasets.json"),
        "output_dir": str(folder / "output"),
        "optimizer": "optimi-adamw",
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "mixed_precision": "no",
        "base_model_precision": "no_change",
        "minimum_image_size": 0,
        "train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_train_steps": STEPS,
        "num_train_epochs": 0,
        "checkpoint_step_interval": STEPS,
        "seed": 42,
        "report_to": "none",
        "disable_benchmark": True,
        "disable_bucket_pruning": True,
        "validation_disable": True,
        "gradient_checkpointing": False,
        **of_the_family,
    }


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
