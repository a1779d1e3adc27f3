"""GH213: capability: GPU access to pageable memory."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.checks._capability import capability_check

CHECK = capability_check(
    code="GH213",
    what="capability: GPU access to pageable memory",
    why="With it the GPU reads plain host memory in place; that is what makes a coherent machine.",
    has=lambda device: device.pageable_access,
    lacking="warn",
    means="not a coherent machine: slabs are registered and copied, which works as well as PCIe allows",
)
