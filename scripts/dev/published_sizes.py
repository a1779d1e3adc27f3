"""Renew what ``plan/published.json`` says of models whose configuration is that of their class in diffusers.

    python scripts/dev/published_sizes.py           count their parameters and write
    python scripts/dev/published_sizes.py --check   count and compare with what is written; exit code 1: it differs

A model is built without memory from its class's defaults and the arguments here, and counted. What comes out has to
agree with what its makers state (``stated``, in billions, and ``source``), or nothing is written. Entries without
``stated`` were read from the models' own files and are left alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from simpletuner_gh200.plan.models import PUBLISHED
from simpletuner_gh200.upstream.flavours import families
from simpletuner_gh200.upstream.source import installed_version

AGREES = 0.06
"""Makers round to whole billions, or to one place."""

KANDINSKY = "arxiv.org/abs/2511.14993"
SANA = "arxiv.org/abs/2501.18427"
_KANDINSKY: dict[str, Any] = {"in_visual_dim": 16, "out_visual_dim": 16}
_KANDINSKY_TEXT = {"text_encoder": "qwen2.5-vl-7b", "text_encoder_2": "clip-l"}
_LARGE = {**_KANDINSKY, "axes_dims": (32, 48, 48)}
_HIDREAM: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 16,
    "num_single_layers": 32,
    "attention_head_dim": 128,
    "num_attention_heads": 20,
    "caption_channels": [4096, 4096],
    "text_emb_dim": 2048,
    "num_routed_experts": 4,
    "num_activated_experts": 2,
    "axes_dims_rope": (64, 32, 32),
    "max_resolution": (128, 128),
    "llama_layers": [*range(32), *[31] * 16],
}
_FOUR_ENCODERS = {"text_encoder": "clip-l", "text_encoder_2": "clip-bigg", "text_encoder_3": "t5-xxl"}

SDXL = "arxiv.org/abs/2307.01952"
COMPONENTS = {
    "clip-h": 354_000_000,
    "llama-3.1-8b": 8_030_000_000,
    "mistral-small-3.1-24b": 24_000_000_000,
    "gemma-3-12b": 12_000_000_000,
    "gemma-2-2b": 2_600_000_000,
    "qwen3-8b": 8_200_000_000,
}
"""As their makers' model cards state them."""


def kandinsky(kind: str, *sizes: str) -> list[str]:
    return [f"kandinskylab/Kandinsky-5.0-{kind}-{size}-Diffusers" for size in sizes]


def hunyuan(*kinds: str) -> list[str]:
    return [f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{kind}" for kind in kinds]


def sana(*names: str) -> list[str]:
    return [f"Efficient-Large-Model/{name}_diffusers" for name in names]


MODELS: list[tuple[str, list[str], str, dict[str, Any], dict[str, str], float, str]] = [
    (
        *("flux2", ["black-forest-labs/FLUX.2-dev"], "Flux2Transformer2DModel", {}),
        *({"text_encoder": "mistral-small-3.1-24b"}, 32, "bfl.ai/blog/flux-2"),
    ),
    (
        *("flux2", ["black-forest-labs/FLUX.2-klein-base-4B"], "Flux2Transformer2DModel"),
        {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
        | {"guidance_embeds": False},
        *({"text_encoder": "qwen3-4b"}, 4, "its name"),
    ),
    (
        *("flux2", ["black-forest-labs/FLUX.2-klein-base-9B"], "Flux2Transformer2DModel"),
        {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
        | {"guidance_embeds": False},
        *({"text_encoder": "qwen3-8b"}, 9, "its name"),
    ),
    (
        *("hidream", [f"HiDream-ai/HiDream-I1-{kind}" for kind in ("Full", "Dev", "Fast")]),
        *("HiDreamImageTransformer2DModel", _HIDREAM),
        *({**_FOUR_ENCODERS, "text_encoder_4": "llama-3.1-8b", "vae": "kl-16"}, 17, "arxiv.org/abs/2505.22705"),
    ),
    (
        *("ltxvideo2", ["Lightricks/LTX-2"], "LTX2VideoTransformer3DModel", {}),
        *({"text_encoder": "gemma-3-12b"}, 19, "arxiv.org/abs/2601.03233"),
    ),
    (
        *("kandinsky5_video", kandinsky("T2V-Lite", "sft-5s", "pretrain-5s", "sft-10s", "pretrain-10s")),
        *("Kandinsky5Transformer3DModel", {**_KANDINSKY, "model_dim": 1792, "ff_dim": 7168, "visual_cond": True}),
        *(_KANDINSKY_TEXT, 2, KANDINSKY),
    ),
    (
        "kandinsky5_video",
        kandinsky("T2V-Pro", "sft-5s", "pretrain-5s", "sft-10s", "pretrain-10s")
        + kandinsky("I2V-Pro", "sft-5s", "pretrain-5s"),
        "Kandinsky5Transformer3DModel",
        {**_LARGE, "model_dim": 4096, "time_dim": 1024, "ff_dim": 16384, "num_visual_blocks": 60, "num_text_blocks": 4}
        | {"visual_cond": True},
        *(_KANDINSKY_TEXT, 19, KANDINSKY),
    ),
    (
        *("kandinsky5_image", kandinsky("T2I-Lite", "sft", "pretrain"), "Kandinsky5Transformer3DModel"),
        {**_LARGE, "model_dim": 2560, "ff_dim": 10240, "num_visual_blocks": 50},
        *(_KANDINSKY_TEXT, 6, KANDINSKY),
    ),
    (
        *(
            "hunyuanvideo",
            hunyuan("480p_t2v", "480p_i2v", "720p_t2v", "720p_i2v", "480p_i2v_distilled"),
        ),
        *("HunyuanVideo15Transformer3DModel", {}),
        *({"text_encoder": "qwen2.5-vl-7b"}, 8.3, "arxiv.org/abs/2511.18870"),
    ),
    (
        *("chroma", [f"lodestones/Chroma1-{kind}" for kind in ("Base", "HD", "Flash")], "ChromaTransformer2DModel", {}),
        *({"text_encoder": "t5-xxl", "vae": "kl-16"}, 8.9, "huggingface.co/lodestones/Chroma1-HD"),
    ),
    (
        *("auraflow", ["fal/AuraFlow", "fal/AuraFlow-v0.2", "terminusresearch/auraflow-v0.3"]),
        *("AuraFlowTransformer2DModel", {}, {"vae": "kl-4"}, 6.8, "blog.fal.ai/auraflow"),
    ),
    (
        *(
            "lumina2",
            ["Alpha-VLLM/Lumina-Image-2.0", "terminusresearch/neta-lumina-v1"],
            "Lumina2Transformer2DModel",
            {},
        ),
        *({"text_encoder": "gemma-2-2b", "vae": "kl-16"}, 2.6, "arxiv.org/abs/2503.21758"),
    ),
    (
        *("sana", sana("SANA1.5_4.8B_1024px"), "SanaTransformer2DModel", {"num_layers": 60}),
        *({"text_encoder": "gemma-2-2b"}, 4.8, SANA),
    ),
    (
        *("sana", sana("SANA1.5_1.6B_1024px", "Sana_1600M_1024px_BF16", "Sana_1600M_2Kpx_BF16")),
        *("SanaTransformer2DModel", {}, {"text_encoder": "gemma-2-2b"}, 1.6, SANA),
    ),
    (
        *("ltxvideo", ["Lightricks/LTX-Video-0.9.5", "Lightricks/LTX-Video"], "LTXVideoTransformer3DModel", {}),
        *({"text_encoder": "t5-xxl"}, 2, "huggingface.co/Lightricks/LTX-Video"),
    ),
    (
        *("sanavideo", sana("SANA-Video_2B_480p"), "SanaVideoTransformer3DModel", {}),
        *({"text_encoder": "gemma-2-2b"}, 2, "its name"),
    ),
    (
        *("z_image_omni", ["TONGYI-Lab/Z-Image-Base", "TONGYI-Lab/Z-Image-Edit"], "ZImageTransformer2DModel", {}),
        *({"text_encoder": "qwen3-4b", "vae": "kl-16"}, 6, "arxiv.org/abs/2511.22699"),
    ),
    (
        *("sd2x", ["stabilityai/stable-diffusion-2-1", "stabilityai/stable-diffusion-2-0"], "UNet2DConditionModel"),
        {"sample_size": 96, "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20]}
        | {"use_linear_projection": True},
        *({"text_encoder": "clip-h", "vae": "kl-4"}, 0.865, SDXL),
    ),
    (
        *("wan", ["Wan-AI/Wan2.2-I2V-A14B-Diffusers"], "WanTransformer3DModel", {"in_channels": 36}),
        *({"text_encoder": "umt5-xxl", "vae": "wan"}, 14, "its name"),
    ),
]
"""Family, repositories, class in diffusers, arguments beside its defaults, components, stated billions, by whom."""


def counted(family: str, names: list[str], kind: str, given: dict[str, Any], parts: dict[str, str]) -> dict[str, Any]:
    import diffusers
    import torch

    with torch.device("meta"):
        model = getattr(diffusers, kind)(**given)
    config = {key: value for key, value in model.config.items() if not key.startswith("_")}
    return {
        "names": names,
        "family": family,
        "part": "unet" if kind.startswith("UNet") else "transformer",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "components": parts,
        "config": {"_class_name": kind, **json.loads(json.dumps(config))},
    }


def renewed(known: dict[str, Any]) -> dict[str, Any]:
    models = [model for model in known["models"] if "stated" not in model]
    for *asked, stated, source in MODELS:
        made = counted(*asked)
        if abs(made["parameters"] / 1e9 / stated - 1) > AGREES:
            raise SystemExit(
                f"{made['names'][0]}: {made['parameters']:,} parameters, and {source} states {stated} billion"
            )
        print(f"{made['names'][0]}: {made['parameters']:,}, stated {stated} billion by {source}")
        models.append({**made, "stated": stated, "source": source})
    newest = {"release": installed_version("simpletuner"), "families": sorted(families())}
    return {**newest, "components": {**known["components"], **COMPONENTS}, "models": models}


def main(words: list[str]) -> int:
    known = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    found = renewed(known)
    if "--check" in words:
        return int(found != known)
    PUBLISHED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
