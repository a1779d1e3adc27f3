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
    RangeState,
    Span,
    device,
)
from simpletuner_gh200.memory.numa import nodes_of_pages

Side = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Advised:
    """Of one piece of advice. ``bool(outcome)`` is True only when it was applied and something confirms it.

    ``reason`` says what was confirmed: of managed memory the driver tells which preference is in force; of system
    memory only the kernel tells, and only where pages are resident now.
    """

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
    # Where page tables are shared, registering memory doesn't pin it: it stays system memory.
    if kind == "host" and not caps.host_page_tables:
        return "it is pinned host memory, which never moves; copies from it run at full speed already"
    return _system_refusal(caps, to_device=to_device)


def _system_refusal(caps: Capabilities, *, to_device: bool) -> str | None:
    if not caps.advises_system_memory:
        return "it is system memory, and this device doesn't use the host's page tables"
    if caps.integrated:
        return "it is system memory, and CPU and GPU share one physical pool here: there is nowhere else to be"
    if to_device and caps.mode == "cdmm":
        return "it is system memory, and in this memory mode (CDMM) the driver keeps that on the CPU"
    return None


def prefer(driver: Driver, caps: Capabilities, span: Span, side: Side) -> Advised:
    """Prefer Grace (``cpu``, mapped for the GPU) or HBM (``gpu``) for the whole pages of ``span``."""
    pages = whole_pages(span, caps.page_size)
    here = device(caps.ordinal)
    where = HOST if side == "cpu" else here
    try:
        kind = _kind(driver, caps, pages)
        blocked = refusal(kind, caps, to_device=side == "gpu")
        if blocked is not None:
            return Advised(False, blocked)
        driver.advise(pages, Advice.SET_PREFERRED_LOCATION, where)
        if side == "cpu":
            driver.advise(pages, Advice.SET_ACCESSED_BY, here)
        if kind == "managed":
            return _preference_read_back(driver.range_state(pages), where, here, pages)
    except _Blocked as nothing:
        return Advised(False, str(nothing))
    except DriverError as failed:
        return Advised(False, f"the driver refused: {failed.message}")
    return _system_preference(caps, pages, side)


def prefetch(driver: Driver, caps: Capabilities, span: Span, where: Location, stream: int) -> Advised:
    """Move the whole pages of ``span``; confirmed by the driver's record, or for system memory by the kernel's.

    The driver answers for managed memory only. The kernel knows where a page is, not where it is going, so for system
    memory this waits for the stream.
    """
    pages = whole_pages(span, caps.page_size)
    try:
        kind = _kind(driver, caps, pages)
        blocked = refusal(kind, caps, to_device=where.kind == "device")
        if blocked is not None:
            return Advised(False, blocked)
        driver.prefetch([pages], where, stream)
        if kind == "managed":
            seen = driver.range_state(pages).last_prefetch
            return _agreement(f"prefetched to {where}", "last prefetch", where, seen, pages)
        driver.synchronize_stream(stream, caps.ordinal)
    except _Blocked as nothing:
        return Advised(False, str(nothing))
    except DriverError as failed:
        return Advised(False, f"the driver refused: {failed.message}")
    return _system_place(caps, pages, on_device=where.kind == "device")


_UNSEEN = "; whether a preference is in force can't be asked for system memory"


class _Blocked(Exception):
    """There is nothing to advise; the message says why."""


def _kind(driver: Driver, caps: Capabilities, pages: Span) -> PointerKind:
    if caps.mode == "none":
        raise _Blocked(f"there is no CUDA device: {caps.absence}")
    if pages[1] == 0:
        raise _Blocked(f"it covers no whole page of {caps.page_size} bytes")
    return driver.pointer_kind(pages[0])


def _preference_read_back(seen: RangeState, where: Location, here: Location, pages: Span) -> Advised:
    if where == HOST and seen.preferred == HOST and here not in seen.accessed_by:
        return Advised(False, f"read back without {here} among those it is mapped for")
    return _agreement(f"prefers {where}", "preferred location", where, seen.preferred, pages)


def _agreement(done: str, what: str, asked: Location, seen: Location | None, pages: Span) -> Advised:
    if seen == asked:
        return Advised(True, done, pages[1])
    return Advised(False, f"the driver accepted it but reports {what} {seen or 'unset or mixed'}, not {asked}")


def _system_preference(caps: Capabilities, pages: Span, side: Side) -> Advised:
    if side == "cpu":
        return _system_place(caps, pages, on_device=False)
    return Advised(False, "the driver accepted it but can't be asked about system memory; a prefetch can be checked")


def _system_place(caps: Capabilities, pages: Span, *, on_device: bool) -> Advised:
    """Where the kernel has the pages: HBM is a node of its own where system memory can be in it."""
    found = nodes_of_pages(*pages, caps.page_size)
    if not found:
        return Advised(False, "the driver accepted it, but the kernel has no pages there yet or doesn't tell")
    where = "device memory" if on_device else "host memory"
    if all((node == caps.device_node) == on_device for node in found):
        return Advised(True, f"resident in {where}, as the kernel tells{'' if on_device else _UNSEEN}", pages[1])
    nodes = ", ".join(f"node {node}" for node in sorted(found))
    return Advised(False, f"the driver accepted it but the kernel has its pages on {nodes}, not in {where}")
