"""Placement hints as the guides name them. Every result is truthy only when something confirms it.

>>> result = prefer_cpu_residency(latents)
>>> bool(result), result.reason
(False, "it is ordinary device memory of PyTorch's caching allocator: ...")

Of a prepared batch, latents and audio are read once per step: Grace. Text, pooled and mask embeds are read by every
block: HBM. The access pattern ``cpu_first`` leaves those in Grace as well, ``balanced`` prefers no side. What the step
computes itself (noise, noisy latents, timesteps) is nobody's to place.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.environment import ACCESS_PATTERN, HINTS, flag, text
from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory import advice
from simpletuner_gh200.memory.advice import HintResult, Side
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver, Span
from simpletuner_gh200.memory.nested import tensors_in

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("simpletuner_gh200")

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

# -- on or off: an override decides, then the environment, then the default, which is off -------------------


_override: bool | None = None


def set_uvm_hint_override(value: bool | None) -> None:
    """Switch hints on or off whatever the environment says; None takes the override away."""
    global _override
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"the override is True, False or None, found {value!r}")
    _override = value


def gh200_uvm_enabled() -> bool:
    """Are placement hints on? What each hint then achieves on this machine its own result says."""
    if _override is not None:
        return _override
    return bool(flag(HINTS))


# -- one tensor ---------------------------------------------------------------------------------------------


_reported: set[tuple[str, str]] = set()


def prefer_cpu_residency(tensor: torch.Tensor) -> HintResult:
    """Keep the tensor's pages in Grace memory, mapped so that the GPU reads them over the link without moving them."""
    return _hint("prefer_cpu_residency", tensor, partial(advice.prefer, side="cpu"))


def prefer_gpu_residency(tensor: torch.Tensor) -> HintResult:
    """Keep the tensor's pages in HBM once they are there. Moves nothing: see ``prefetch_to_device``."""
    return _hint("prefer_gpu_residency", tensor, partial(advice.prefer, side="gpu"))


def prefetch_to_device(tensor: torch.Tensor, device_index: Any = None) -> HintResult:
    """Move the tensor's pages to HBM, on the current stream, so that kernels queued after it find them there.

    ``device_index`` is an index, a ``torch.device`` or its name; by default the tensor's own device, else this rank's.
    """

    def move(driver: Driver, caps: Capabilities, span: Span) -> HintResult:
        return advice.prefetch(driver, caps, span, _current_stream(caps.ordinal))

    return _hint("prefetch_to_device", tensor, move, device_index)


def _hint(name: str, tensor: Any, act: Callable[..., HintResult], device_index: Any = None) -> HintResult:
    if not gh200_uvm_enabled():
        result = HintResult(False, f"hints are off: no configuration asks for them, nor does {HINTS}")
    elif isinstance(span := span_of(tensor), str):
        result = HintResult(False, span)
    else:
        driver = detect.current()
        try:
            result = act(driver, driver.capabilities(_ordinal(tensor, device_index, driver.home)), span)
        except MemoryRoomError as unknown:
            result = HintResult(False, f"the device can't be queried: {unknown.message}")
    if not result and (name, result.reason) not in _reported:
        _reported.add((name, result.reason))
        logger.info("gh200: %s did nothing: %s (said once)", name, result.reason)
    return result


def span_of(tensor: Any) -> Span | str:
    """The bytes of a tensor, or why it has none of its own in one piece."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        return f"it is not a tensor but {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.device.type not in {"cpu", "cuda"}:
        return f"a {tensor.layout} tensor on {tensor.device.type} has no plain memory to place"
    if not tensor.is_contiguous():
        return "it is not contiguous: its bytes are not in one piece"
    return int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size())


def _ordinal(tensor: torch.Tensor, requested: Any, home: int) -> int:
    import torch

    if isinstance(requested, int):
        return requested
    found = torch.device(requested) if requested is not None else tensor.device
    return home if found.index is None else int(found.index)


def _current_stream(ordinal: int) -> int:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


# -- a batch ------------------------------------------------------------------------------------------------


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


def side_of(key: str = "", parent: str = "") -> Side | None:
    """Where a tensor under this key belongs; None where it isn't ours to say."""
    if key in GRACE_KEYS or ("audio" in parent and key in INSIDE_AUDIO):
        return "cpu"
    return "gpu" if key.endswith(HBM_ENDINGS) else None


def optimize_batch_for_gh200(batch: Any, access_pattern: str | None = None) -> BatchReport:
    """Give each tensor of ``batch`` its placement hint. The batch is never changed; the report says what came of it.

    ``access_pattern``: ``gpu_first``, ``balanced`` or ``cpu_first``; None: what GH200_UVM_ACCESS_PATTERN says.
    """
    report = BatchReport()
    if not gh200_uvm_enabled():
        return report
    pattern = access_pattern or text(ACCESS_PATTERN) or "gpu_first"
    for keys, tensor in tensors_in(batch):
        side = side_of(*keys[:-3:-1])
        if side is None:
            report.untouched += 1
        elif result := _place(tensor, side, pattern):
            report.helped += 1
        else:
            report.not_helped += 1
            report.reasons[result.reason] += 1
    return report


def _place(tensor: Any, side: Side, pattern: str) -> HintResult:
    if side == "cpu" or pattern == "cpu_first":
        return prefer_cpu_residency(tensor)
    if pattern == "balanced":
        return prefetch_to_device(tensor)  # there ahead of use, free to move afterwards
    # The preference of system memory can't be read back; where it went with the prefetch can.
    prefer_gpu_residency(tensor)
    return prefetch_to_device(tensor)
