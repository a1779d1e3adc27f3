"""Placement of one tensor, with honest results: truthy only when the driver took the advice and confirmed it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory import advice, hint_switch
from simpletuner_gh200.memory.advice import Advised
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver, Span, device

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("simpletuner_gh200")


class HintResult(int):
    """1 or 0, so that it equals True or False; ``reason`` says what happened, or why nothing did."""

    reason: str

    def __new__(cls, applied: bool, reason: str) -> HintResult:
        made = super().__new__(cls, applied)
        made.reason = reason
        return made

    def __repr__(self) -> str:
        return f"HintResult({bool(self)}, {self.reason!r})"


class _Tally:
    """How often each hint was refused for each reason, over the life of the process."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def refused(self, hint: str, reason: str) -> None:
        with self._lock:
            self._counts[hint, reason] += 1
            first = self._counts[hint, reason] == 1
        if first:
            logger.info("gh200: %s did nothing: %s (said once)", hint, reason)

    def read(self) -> dict[tuple[str, str], int]:
        with self._lock:
            return dict(self._counts)


_tally = _Tally()


def refusals() -> dict[tuple[str, str], int]:
    """(hint, reason) -> how many times, since the process started."""
    return _tally.read()


def prefer_cpu_residency(tensor: torch.Tensor) -> HintResult:
    """Keep the tensor's pages in Grace memory, mapped so that the GPU reads them over the link without moving them."""
    return _hint("prefer_cpu_residency", tensor, lambda driver, caps, span: advice.prefer(driver, caps, span, "cpu"))


def prefer_gpu_residency(tensor: torch.Tensor) -> HintResult:
    """Keep the tensor's pages in HBM once they are there. Moves nothing: see ``prefetch_to_device``."""
    return _hint("prefer_gpu_residency", tensor, lambda driver, caps, span: advice.prefer(driver, caps, span, "gpu"))


def prefetch_to_device(tensor: torch.Tensor, device_index: Any = None) -> HintResult:
    """Move the tensor's pages to HBM, on the current stream, so that kernels queued after it find them there.

    ``device_index`` is an index, a ``torch.device`` or its name; by default the tensor's own device, else this rank's.
    """

    def move(driver: Driver, caps: Capabilities, span: Span) -> Advised:
        return advice.prefetch(driver, caps, span, device(caps.ordinal), _current_stream(caps.ordinal))

    return _hint("prefetch_to_device", tensor, move, device_index)


def _hint(
    name: str, tensor: Any, act: Callable[[Driver, Capabilities, Span], Advised], device_index: Any = None
) -> HintResult:
    result = _attempt(tensor, act, device_index)
    if not result:
        _tally.refused(name, result.reason)
    return result


def _attempt(tensor: Any, act: Callable[[Driver, Capabilities, Span], Advised], device_index: Any) -> HintResult:
    switch = hint_switch.decision()
    if not switch.enabled:
        return HintResult(False, f"hints are off: {switch.reason}")
    span = span_of(tensor)
    if isinstance(span, str):
        return HintResult(False, span)
    driver = detect.current()
    try:
        caps = driver.capabilities(_ordinal(tensor, device_index, driver.home))
    except MemoryRoomError as unknown:
        return HintResult(False, f"the device can't be asked: {unknown.message}")
    outcome = act(driver, caps, span)
    return HintResult(outcome.confirmed, outcome.reason)


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


def _ordinal(tensor: torch.Tensor, asked: Any, home: int) -> int:
    import torch

    if isinstance(asked, int):
        return asked
    found = torch.device(asked) if asked is not None else tensor.device
    return home if found.index is None else int(found.index)


def _current_stream(ordinal: int) -> int:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(ordinal).cuda_stream)
