"""A real Wan pipeline of a few hundred kilobytes, four clips of twelve frames, and a configuration that trains on them.

``python -m scripts.feature_matrix.video_project FOLDER``; in a process of its own, since it imports torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scripts.feature_matrix.media_project import TEXT_WIDTH, UNIFIED, text_embeds, training, write, write_tokenizer

CLIPS, FRAMES, SIZE = 4, 12, 64


def main(folder: Path) -> None:
    if not (folder / "model" / "model_index.json").is_file():
        write_model(folder / "model")
    write_clips(folder / "clips")
    write(folder / "datasets.json", datasets(folder))
    write(folder / "config.json", configuration(folder))


def write_model(folder: Path) -> None:
    import torch
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(1234)
    words = write_tokenizer(folder / "tokenizer")
    text = UMT5Config(vocab_size=words, d_model=TEXT_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    UMT5EncoderModel(text).save_pretrained(folder / "text_encoder")
    WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        text_dim=TEXT_WIDTH,
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
    return [clips, text_embeds(folder)]


def configuration(folder: Path) -> dict[str, Any]:
    return training(
        folder,
        model_family="wan",
        model_flavour="t2v-480p-1.3b-2.1",
        pretrained_vae_model_name_or_path=str(folder / "model"),
        resolution=SIZE,
        resolution_type="pixel",
        framerate=8,
        **UNIFIED,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
