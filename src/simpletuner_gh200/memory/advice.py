"""Advice on system memory, for whole pages, and confirmed by the kernel.

A return code says only that the driver accepted the call: under CDMM, for instance, a prefetch of system memory "to
the GPU" succeeds and lands on the CPU. So it counts only where the kernel, asked, has the pages there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver.interface import HOST, Capabilities, Driver, PointerKind, Span, device
from simpletuner_gh200.memory.numa import nodes_of_pages

Side = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Advised:
    """``bool(outcome)`` is True only when something confirms it; ``reason`` says what, or why nothing does."""

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
    return first, max(0, (address + size) // page * page - first)


def refusal(kind: PointerKind, caps: Capabilities, *, to_device: bool = False) -> str | None:
    """Why memory of this kind can't be advised (towards the device) here; None where it can."""
    if kind == "device":
        return (
            "it is ordinary device memory of PyTorch's caching allocator, which takes no advice, so it stays where it "
            "is (use use_uvm for torch's own state, unified_memory caches for data)"
        )
    if kind == "managed":
        return "it is managed memory, which nothing here allocates: its owner advises it"
    if kind == "host" and not caps.host_page_tables:
        return "it is pinned host memory, which never moves; copies from it run at full speed already"
    if not caps.concurrent_managed or not caps.advises_system_memory:
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
    try:
        why = _nothing_to_advise(driver, caps, pages, side)
        if why is not None:
            return Advised(False, why)
        driver.prefer(pages, *((HOST, here) if side == "cpu" else (here,)))
    except DriverError as failed:
        return Advised(False, f"the driver refused: {failed.message}")
    if side == "cpu":
        return _as_the_kernel_tells(caps, pages, side)
    return Advised(False, "the driver accepted it but can't be asked about system memory; a prefetch can be checked")


def prefetch(driver: Driver, caps: Capabilities, span: Span, side: Side, stream: int) -> Advised:
    """Move the whole pages of ``span``, behind what is queued on ``stream``."""
    pages = whole_pages(span, caps.page_size)
    try:
        why = _nothing_to_advise(driver, caps, pages, side)
        if why is not None:
            return Advised(False, why)
        driver.prefetch(pages, HOST if side == "cpu" else device(caps.ordinal), stream)
    except DriverError as failed:
        return Advised(False, f"the driver refused: {failed.message}")
    return _as_the_kernel_tells(caps, pages, side)


def _nothing_to_advise(driver: Driver, caps: Capabilities, pages: Span, side: Side) -> str | None:
    if caps.mode == "none":
        return f"there is no CUDA device: {caps.absence}"
    if pages[1] == 0:
        return f"it covers no whole page of {caps.page_size} bytes"
    return refusal(driver.pointer_kind(pages[0]), caps, to_device=side == "gpu")


def _as_the_kernel_tells(caps: Capabilities, pages: Span, side: Side) -> Advised:
    """HBM is a node of its own where system memory can be in it."""
    found = nodes_of_pages(*pages, caps.page_size)
    if not found:
        return Advised(False, "the driver accepted it, but the kernel has no pages there yet or doesn't tell")
    where = "device memory" if side == "gpu" else "host memory"
    if all((node == caps.device_node) == (side == "gpu") for node in found):
        unseen = "" if side == "gpu" else "; whether a preference is in force can't be asked for system memory"
        return Advised(True, f"resident in {where}, as the kernel tells{unseen}", pages[1])
    nodes = ", ".join(f"node {node}" for node in sorted(found))
    return Advised(False, f"the driver accepted it but the kernel has its pages on {nodes}, not in {where}")
