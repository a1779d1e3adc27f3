"""GH304: the kernel's page size, and what follows for migration."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, passed, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.units import KIB, format_bytes


def _run(context: Context) -> Finding:
    size = context.page_size
    shown = f"{format_bytes(size)} pages"
    if context.machine not in {"aarch64", "arm64"}:
        return passed(f"{shown}, as usual on {context.machine}")
    if size >= 64 * KIB:
        return passed(f"{shown}, as NVIDIA recommends for Grace")
    return warned(
        f"{shown}: with these the driver's access counters never migrate anything, and page tables are 16 times larger",
        "install the distribution's 64k kernel (linux-image-nvidia-64k-hwe-*); until then rely on explicit prefetch, "
        "as the extension does, not on automatic migration",
    )


CHECK = Check(
    code="GH304",
    what="page size",
    why="It decides whether the GPU's access counters can move pages by themselves, and what first touches cost.",
    run=_run,
)
