"""GH215: capability: direct host access to managed memory."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.checks._capability import capability_check

CHECK = capability_check(
    code="GH215",
    what="capability: direct host access to managed memory",
    why="With it the CPU reads managed memory in HBM without moving it.",
    has=lambda device: device.direct_managed_from_host,
    lacking="warn",
    means="managed memory moves when the CPU touches it: keep data that both touch out of it (slab: auto does)",
)
