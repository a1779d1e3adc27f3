"""Advice on memory: validated before anything is done, applied to whole pages, and read back afterwards.

A return code says only that the driver accepted the call: under CDMM, for instance, a prefetch of system memory "to
the GPU" succeeds and lands on the CPU. So an outcome counts as confirmed only when the driver, asked again, agrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver.interface import (
    HOST,
    Advice,
    Capabilities,
    Driver,
    Location,
    PointerKind,
    Span,
    device,
)

Side = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Outcome:
    """Of one piece of advice. ``bool(outcome)`` is True only when it was applied and the driver confirmed it."""

    confirmed: bool
    reason: str
    size: int = 0
    """Bytes of the whole pages it covers."""

    def __bool__(self) -> bool:
        return self.confirmed


def whole_pages(span: Span, page: int) -> Span:
    """The pages that lie entirely inside ``span``, so that neighbours are never advised along."""
    address, size = span
    first = -(-address // page) * page
    end = (address + size) // page * page
    return first, max(0, end - first)


def refusal(kind: PointerKind, caps: Capabilities, *, to_device: bool = False) -> str | None:
    """Why memory of this kind can't be advised (towards the device) here; None where it can."""
    if kind == "device":
        return (
            "it is ordinary device memory of PyTorch's caching allocator: CUDA takes advice only for managed memory, "
            "so it stays where it is (use use_uvm for torch's own state, unified_memory caches for data)"
        )
    if not caps.concurrent_managed:
        return "CPU and GPU can't use managed memory at the same time on this device"
    if kind == "managed":
        return None
    if kind == "host":
        return "it is pinned host memory, which never moves; copies from it run at full speed already"
    if not caps.advises_system_memory:
        return "it is system memory, and this device doesn't use the host's page tables"
    if to_device and caps.mode == "cdmm":
        return "it is system memory, and in this memory mode (CDMM) the driver keeps that on the CPU"
    return None


def prefer(driver: Driver, caps: Capabilities, span: Span, side: Side) -> Outcome:
    """Prefer Grace (``cpu``, mapped for the GPU) or HBM (``gpu``) for the whole pages of ``span``."""
    pages = whole_pages(span, caps.page_size)
    blocked = _blocked(driver, caps, pages, to_device=side == "gpu")
    if blocked is not None:
        return Outcome(False, blocked)
    here = device(caps.ordinal)
    where = HOST if side == "cpu" else here
    try:
        driver.advise(pages, Advice.SET_PREFERRED_LOCATION, where)
        if side == "cpu":
            driver.advise(pages, Advice.SET_ACCESSED_BY, here)
        seen = driver.range_state(pages)
    except DriverError as failed:
        return Outcome(False, f"the driver refused: {failed.message}")
    if seen.preferred != where:
        return _disagreement("preferred location", where, seen.preferred)
    if side == "cpu" and here not in seen.accessed_by:
        return Outcome(False, f"read back without {here} among those it is mapped for")
    return Outcome(True, f"prefers {where}", pages[1])


def prefetch(driver: Driver, caps: Capabilities, span: Span, where: Location, stream: int) -> Outcome:
    """Move the whole pages of ``span``; confirmed by the driver's record of the last prefetch."""
    pages = whole_pages(span, caps.page_size)
    blocked = _blocked(driver, caps, pages, to_device=where.kind == "device")
    if blocked is not None:
        return Outcome(False, blocked)
    try:
        driver.prefetch([pages], where, stream)
        seen = driver.range_state(pages)
    except DriverError as failed:
        return Outcome(False, f"the driver refused: {failed.message}")
    if seen.last_prefetch != where:
        return _disagreement("last prefetch", where, seen.last_prefetch)
    return Outcome(True, f"prefetched to {where}", pages[1])


def _blocked(driver: Driver, caps: Capabilities, pages: Span, *, to_device: bool) -> str | None:
    if caps.mode == "none":
        return f"there is no CUDA device: {caps.name}"
    if pages[1] == 0:
        return f"it covers no whole page of {caps.page_size} bytes"
    try:
        return refusal(driver.pointer_kind(pages[0]), caps, to_device=to_device)
    except DriverError as failed:
        return f"the driver refused: {failed.message}"


def _disagreement(what: str, asked: Location, seen: Location | None) -> Outcome:
    return Outcome(False, f"the driver accepted it but reports {what} {seen or 'unset or mixed'}, not {asked}")
