"""Advice on system memory, for whole pages, and confirmed by the kernel.

A return code says only that the driver accepted the call: under CDMM, for instance, a prefetch of system memory "to
the GPU" succeeds and lands on the CPU. So it counts only where the kernel, asked, has the pages there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver.interface import HOST, Capabilities, Driver, Span, device
from simpletuner_gh200.memory.numa import nodes_of_pages

Side = Literal["cpu", "gpu"]


class HintResult(int):
    """1 or 0, so that it equals True or False: something confirms it, or nothing does; ``reason`` says what, or why."""

    reason: str

    def __new__(cls, confirmed: bool, reason: str) -> HintResult:
        made = super().__new__(cls, confirmed)
        made.reason = reason
        return made

    def __repr__(self) -> str:
        return f"HintResult({bool(self)}, {self.reason!r})"


def prefer(driver: Driver, caps: Capabilities, span: Span, side: Side) -> HintResult:
    """Prefer Grace (``cpu``, mapped for the GPU) or HBM (``gpu``) for the whole pages of ``span``."""
    here = device(caps.ordinal)
    places = (HOST, here) if side == "cpu" else (here,)
    return _advise(driver, caps, span, side, lambda pages: driver.prefer(pages, *places), shows=side == "cpu")


def prefetch(driver: Driver, caps: Capabilities, span: Span, stream: int) -> HintResult:
    """Move the whole pages of ``span`` to HBM, behind what is queued on ``stream``."""
    return _advise(driver, caps, span, "gpu", lambda pages: driver.prefetch(pages, device(caps.ordinal), stream))


def _advise(
    driver: Driver, caps: Capabilities, span: Span, side: Side, act: Callable[[Span], None], *, shows: bool = True
) -> HintResult:
    """``shows``: the kernel can tell whether it came about. HBM is a node where system memory can be in it."""
    pages = _whole_pages(span, caps.page_size)
    try:
        why = _nothing_to_advise(driver, caps, pages, side)
        if why is not None:
            return HintResult(False, why)
        act(pages)
    except DriverError as failed:
        return HintResult(False, f"the driver refused: {failed.message}")
    if not shows:
        unseen = "the driver accepted it but can't be queried about system memory; a prefetch can be checked"
        return HintResult(False, unseen)
    found = nodes_of_pages(*pages, caps.page_size)
    if not found:
        return HintResult(False, "the driver accepted it, but the kernel has no pages there yet or doesn't tell")
    where = "device memory" if side == "gpu" else "host memory"
    if all((node == caps.device_node) == (side == "gpu") for node in found):
        unseen = "" if side == "gpu" else "; whether a preference is in force can't be queried for system memory"
        return HintResult(True, f"resident in {where}, as the kernel tells{unseen}")
    nodes = ", ".join(f"node {node}" for node in sorted(found))
    return HintResult(False, f"the driver accepted it but the kernel has its pages on {nodes}, not in {where}")


def _whole_pages(span: Span, page: int) -> Span:
    """The pages that lie entirely inside ``span``, so that neighbours are never advised along."""
    address, size = span
    first = -(-address // page) * page
    return first, max(0, (address + size) // page * page - first)


def _nothing_to_advise(driver: Driver, caps: Capabilities, pages: Span, side: Side) -> str | None:
    """Why these pages can't be advised towards that side; None where they can."""
    if caps.mode == "none":
        return f"there is no CUDA device: {caps.absence}"
    if pages[1] == 0:
        return f"it covers no whole page of {caps.page_size} bytes"
    kind = driver.pointer_kind(pages[0])
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
    if side == "gpu" and caps.mode == "cdmm":
        return "it is system memory, and in this memory mode (CDMM) the driver keeps that on the CPU"
    return None
