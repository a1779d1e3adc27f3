"""A real ACE-Step whose every size that can be chosen is tiny, four tones, and two configurations that train on them.

``python -m scripts.feature_matrix.audio_project FOLDER``; in a process of its own, since it imports SimpleTuner.
``stock.json`` is SimpleTuner's alone, ``config.json`` the same run with data in memory and unified caches.
"""

from __future__ import annotations

import math
import struct
import sys
import wave
from pathlib import Path
from typing import Any

from scripts.feature_matrix.media_project import TEXT_WIDTH, UNIFIED, text_embeds, training, write, write_tokenizer

TONES, SECONDS, RATE = 4, 1, 48000


def main(folder: Path) -> None:
    if not (folder / "model" / "umt5-base" / "config.json").is_file():
        write_model(folder / "model")
    write_tones(folder / "tones")
    for name, kind, more in (("stock", "local", {}), ("config", "in_memory", UNIFIED)):
        write(folder / f"{name}.datasets.json", [tones(folder, kind), text_embeds(folder)])
        mine = {"data_backend_config": str(folder / f"{name}.datasets.json"), "output_dir": str(folder / name)}
        write(folder / f"{name}.json", training(folder, model_family="ace_step", model_flavour="base", **mine, **more))


def write_model(folder: Path) -> None:
    """As ACE-Step's own repository lays it out. Its lyric encoder has one size, which makes it 300 MB all the same."""
    import torch
    from diffusers import AutoencoderDC
    from simpletuner.helpers.models.ace_step.music_dcae.music_vocoder import ADaMoSHiFiGANV1
    from simpletuner.helpers.models.ace_step.transformer import ACEStepTransformer2DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(1234)
    AutoencoderDC(
        in_channels=2,
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        encoder_layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        encoder_qkv_multiscales=((), (), (), ()),
        decoder_qkv_multiscales=((), (), (), ()),
        downsample_block_type="Conv",
        upsample_block_type="interpolate",
    ).save_pretrained(folder / "music_dcae_f8c8")
    ADaMoSHiFiGANV1(depths=[1, 1, 1, 1], dims=[8, 8, 8, 16], num_mels=16, upsample_initial_channel=128).save_pretrained(
        folder / "music_vocoder"
    )
    ACEStepTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        inner_dim=32,
        text_embedding_dim=TEXT_WIDTH,
        max_position=1024,
        ssl_latent_dims=[8, 8],
    ).save_pretrained(folder / "ace_step_transformer")
    words = write_tokenizer(folder / "umt5-base")
    text = UMT5Config(vocab_size=words, d_model=TEXT_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    UMT5EncoderModel(text).save_pretrained(folder / "umt5-base")


def write_tones(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(TONES):
        pitch = 220.0 * (number + 1)
        samples = (int(9000 * math.sin(2 * math.pi * pitch * n / RATE)) for n in range(SECONDS * RATE))
        frames = b"".join(struct.pack("<hh", sample, sample) for sample in samples)
        with wave.open(str(folder / f"tone_{number}.wav"), "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(frames)
        (folder / f"tone_{number}.txt").write_text(f"a tone of {pitch:.0f} hertz", encoding="utf-8")


def tones(folder: Path, kind: str) -> dict[str, Any]:
    entry = {
        "id": "tones",
        "type": kind,
        "dataset_type": "audio",
        "instance_data_dir": str(folder / "tones"),
        "caption_strategy": "textfile",
        "metadata_backend": "discovery",
        "cache_dir_vae": str(folder / "cache" / "vae"),
        "audio": {"bucket_strategy": "duration", "duration_interval": 1.0, "max_duration_seconds": 10},
        "repeats": 0,
    }
    return {**entry, "in_memory": {}} if kind == "in_memory" else entry


if __name__ == "__main__":
    main(Path(sys.argv[1]))
