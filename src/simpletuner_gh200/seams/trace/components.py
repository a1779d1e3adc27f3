"""The other models of a pipeline, without weights: how many parameters they have, what encoding and decoding takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simpletuner_gh200.seams.trace import build
from simpletuner_gh200.seams.trace.guise import LikeHopper
from simpletuner_gh200.seams.trace.meter import LiveBytes, storages


def parameters(config: Mapping[str, Any]) -> int:
    """Of a component, from its configuration alone."""
    return sum(parameter.numel() for parameter in _made(config, torch.bfloat16).parameters())


def vae_work(config: Mapping[str, Any], pixels: Sequence[int], *, dtype: str) -> dict[str, int]:
    """Bytes beyond its weights while a VAE encodes ``pixels`` (batch, channels, ...), and while it decodes them."""
    weights = getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype])
    vae = _made(config, weights).eval()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    build.into_fake(vae, mode)
    known = storages([*vae.parameters(), *vae.buffers()])
    with mode, LikeHopper(), torch.no_grad():
        image = torch.empty(*pixels, dtype=weights)
        with LiveBytes(known) as encoding:
            latent = vae.encode(image).latent_dist.mode()
        del image
        with LiveBytes(known) as decoding:
            vae.decode(latent)
    return {"encode": encoding.peak, "decode": decoding.peak}


def _made(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    import diffusers

    name = str(config.get("_class_name") or "")
    if hasattr(diffusers, name):
        return build.on_meta(getattr(diffusers, name), config, dtype)
    import transformers

    given = dict(config)
    kind = getattr(transformers, str((given.get("architectures") or [""])[0]), transformers.AutoModel)
    settings = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("meta"):
        return kind(settings) if kind is not transformers.AutoModel else kind.from_config(settings)
