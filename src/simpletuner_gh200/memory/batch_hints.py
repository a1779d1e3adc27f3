"""A prepared batch: which of its tensors belong on which side, and what could be done about it.

Latents and audio are read once per step: Grace. Text, pooled and mask embeds are read by every block: HBM. What the
step computes itself (noise, noisy latents, timesteps) is nobody's to place.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from simpletuner_gh200.memory import hint_switch
from simpletuner_gh200.memory.advice import Side
from simpletuner_gh200.memory.residency import (
    HintResult,
    prefer_cpu_residency,
    prefer_gpu_residency,
    prefetch_to_device,
)

GRACE_KEYS = frozenset(
    {
        "latents",
        "latent_batch",
        "conditioning_latents",
        "audio_latents",
        "audio_latent_batch",
        "audio_samples",
        "waveform",
        "waveforms",
        "video_latents",
    }
)
HBM_ENDINGS = (
    "prompt_embeds",
    "text_embeds",
    "image_embeds",
    "encoder_hidden_states",
    "attention_mask",
    "attention_masks",
    "prompt_mask",
    "pooled_projections",
)
INSIDE_AUDIO = frozenset({"samples", "latents", "waveform"})
"""What a nested ``audio`` block calls its own."""

DEEPEST = 8
"""Batches nest two or three levels; this only stops one that contains itself."""


@dataclass
class BatchReport:
    """What ``optimize_batch_for_gh200`` could do for one batch. Truthy if it helped at least one tensor."""

    helped: int = 0
    not_helped: int = 0
    untouched: int = 0
    """Tensors under keys that are not ours to place."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why the others could not be helped."""

    def __bool__(self) -> bool:
        return self.helped > 0

    def add(self, result: HintResult) -> None:
        if result:
            self.helped += 1
        else:
            self.not_helped += 1
            self.reasons[result.reason] += 1


def side_of(key: str, parent: str = "") -> Side | None:
    """Where a tensor under this key belongs; None where it isn't ours to say."""
    if key in GRACE_KEYS or ("audio" in parent and key in INSIDE_AUDIO):
        return "cpu"
    return "gpu" if key.endswith(HBM_ENDINGS) else None


def tensors_in(batch: Any) -> Iterator[tuple[Side | None, Any]]:
    """Every tensor of nested dicts, lists, tuples and dataclasses, with the side its key asks for."""
    import torch

    yield from _walk(batch, "", "", torch.Tensor, 0)


def _walk(value: Any, key: str, parent: str, kind: type, depth: int) -> Iterator[tuple[Side | None, Any]]:
    if isinstance(value, kind):
        yield side_of(key, parent), value
        return
    if depth == DEEPEST:
        return
    for inner_key, inner in _children(value):
        # Items of a list belong under the list's own key.
        name, above = (key, parent) if inner_key is None else (inner_key, key)
        yield from _walk(inner, name, above, kind, depth + 1)


def _children(value: Any) -> Iterator[tuple[str | None, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((None, inner) for inner in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((spec.name, getattr(value, spec.name, None)) for spec in dataclasses.fields(value))


def optimize_batch_for_gh200(batch: Any) -> BatchReport:
    """Give each tensor of ``batch`` its placement hint. The batch is never changed; the report says what came of it."""
    report = BatchReport()
    if not hint_switch.gh200_uvm_enabled():
        return report
    for side, tensor in tensors_in(batch):
        if side is None:
            report.untouched += 1
        else:
            report.add(_place(tensor, side))
    return report


def _place(tensor: Any, side: Side) -> HintResult:
    if side == "cpu":
        return prefer_cpu_residency(tensor)
    # The preference of system memory can't be read back; where it went with the prefetch can.
    prefer_gpu_residency(tensor)
    return prefetch_to_device(tensor)
