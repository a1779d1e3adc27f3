"""A real Wan pipeline of a few hundred kilobytes, four clips of twelve frames, and a configuration that trains on them.

``python -m scripts.feature_matrix.video_project FOLDER``; in a process of its own, since it imports torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CLIPS, FRAMES, SIZE = 4, 12, 64
STEPS = 2
_TEXT_WIDTH = 32


def main(folder: Path) -> None:
    if not (folder / "model" / "model_index.json").is_file():
        write_model(folder / "model")
    write_clips(folder / "clips")
    (folder / "datasets.json").write_text(json.dumps(datasets(folder), indent=2), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(training(folder), indent=2), encoding="utf-8")


def write_model(folder: Path) -> None:
    import torch
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(1234)
    words = write_tokenizer(folder / "tokenizer")
    text = UMT5Config(vocab_size=words, d_model=_TEXT_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    UMT5EncoderModel(text).save_pretrained(folder / "text_encoder")
    WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        text_dim=_TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        rope_max_seq_len=64,
    ).save_pretrained(folder / "transformer")
    AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1).save_pretrained(folder / "vae")
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0).save_pretrained(
        folder / "scheduler"
    )
    index = {
        "_class_name": "WanPipeline",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def write_tokenizer(folder: Path) -> int:
    """One token per letter; returns how many there are."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    from tokenizers.pre_tokenizers import Metaspace
    from transformers import PreTrainedTokenizerFast

    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((chr(c), -3.0) for c in range(33, 127))]
    letters = Tokenizer(Unigram(vocabulary, unk_id=2))
    letters.pre_tokenizer = Metaspace()
    specials = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=letters, **specials).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "tokenizer_class": "T5TokenizerFast", "extra_ids": 0}
    path.write_text(json.dumps(config), encoding="utf-8")
    return len(vocabulary)


def write_clips(folder: Path) -> None:
    """A bar that moves over a field of grey."""
    import imageio.v2 as imageio
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(CLIPS):
        frames = np.full((FRAMES, SIZE, SIZE, 3), 30 * number, np.uint8)
        for moment, frame in enumerate(frames):
            frame[:, 4 * moment : 4 * moment + 8] = 250
        (folder / f"clip_{number}.txt").write_text(f"a bar that moves, number {number}", encoding="utf-8")
        imageio.mimwrite(str(folder / f"clip_{number}.mp4"), list(frames), fps=8, macro_block_size=1)


def datasets(folder: Path) -> list[dict[str, Any]]:
    clips = {
        "id": "clips",
        "type": "in_memory",
        "dataset_type": "video",
        "instance_data_dir": str(folder / "clips"),
        "caption_strategy": "textfile",
        "resolution": SIZE,
        "resolution_type": "pixel",
        "minimum_image_size": 0,
        "cache_dir_vae": str(folder / "cache" / "vae"),
        "crop": True,
        "crop_aspect": "square",
        "crop_style": "center",
        "metadata_backend": "discovery",
        "repeats": 0,
        "video": {"num_frames": 9, "min_frames": 9},
        "in_memory": {},
    }
    text = {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True}
    return [clips, {**text, "cache_dir": str(folder / "cache" / "text")}]


def training(folder: Path) -> dict[str, Any]:
    return {
        "model_family": "wan",
        "model_flavour": "t2v-480p-1.3b-2.1",
        "model_type": "lora",
        "lora_type": "standard",
        "lora_rank": 4,
        "pretrained_model_name_or_path": str(folder / "model"),
        "pretrained_vae_model_name_or_path": str(folder / "model"),
        "data_backend_config": str(folder / "datasets.json"),
        "output_dir": str(folder / "output"),
        "optimizer": "optimi-adamw",
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "mixed_precision": "no",
        "base_model_precision": "no_change",
        "resolution": SIZE,
        "resolution_type": "pixel",
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
        "framerate": 8,
        "cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
