"""What made a cache's entries: the parts of a run's configuration that decide what SimpleTuner writes into them.

Packs carry this text, and a run with another one does not take them. So only keys that change the cached values belong
here: any other would throw packs away that are as good as new.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_MODEL = r"model_family|model_flavour|pretrained_model_name_or_path|revision|variant|mixed_precision"
_VAE = r"pretrained_vae_.*|vae_dtype"
_ENCODERS = (
    r".*(text_encoder|image_encoder|t5|gemma|grounding).*(path|subfolder|precision|revision)|tokenizer_max_length"
)
_NETWORK = r"pretrained_(transformer|unet)_.*|base_model_precision|controlnet_model_name_or_path"

ARGUMENTS = {
    "vae": f"{_MODEL}|{_VAE}",
    "audio": f"{_MODEL}|{_VAE}",
    "text": f"{_MODEL}|{_ENCODERS}",
    "image_embed": f"{_MODEL}|{_ENCODERS}|{_VAE}",
    "distillation": f"{_MODEL}|{_VAE}|{_ENCODERS}|{_NETWORK}",
}
"""By kind of cache: the arguments, as a pattern, since families bring encoders of their own."""

SAMPLES = (
    r"resolution|resolution_type|pixel_resolution|crop|crop_.*|aspect_bucket_(rounding|alignment)|"
    r"maximum_image_size|target_downsample_size|video|audio|conditioning_type"
)
"""Keys of the dataset and arguments that decide what goes into the encoder."""


def made_by(kind: str, arguments: Any, dataset: Mapping[str, Any]) -> str:
    """One line of JSON, the same for the same values. ``dataset``: as configured; text has no samples."""
    asked = vars(arguments) if arguments is not None else {}
    values = {key: asked[key] for key in _matching(ARGUMENTS[kind], frozenset(asked))}
    if kind != "text":
        values |= {key: asked[key] for key in _matching(SAMPLES, frozenset(asked))}
        values |= {f"dataset.{key}": dataset[key] for key in _matching(SAMPLES, frozenset(dataset))}
    given = {key: value for key, value in values.items() if value is not None}
    return json.dumps(given, sort_keys=True, separators=(",", ":"), default=str)


@lru_cache(maxsize=32)
def _matching(pattern: str, keys: frozenset[str]) -> tuple[str, ...]:
    """Those of a run's hundreds of arguments that the pattern names: every cache of a run asks the same."""
    wanted = re.compile(pattern)
    return tuple(key for key in keys if wanted.fullmatch(key))
