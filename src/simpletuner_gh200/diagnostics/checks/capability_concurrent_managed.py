"""GH212: capability: concurrent managed access."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.checks._capability import capability_check

CHECK = capability_check(
    code="GH212",
    what="capability: concurrent managed access",
    why="Without it CPU and GPU may not touch managed memory at the same time.",
    has=lambda device: device.concurrent_managed,
    lacking="warn",
    means="leave slab: managed out of the configuration; auto does",
)
