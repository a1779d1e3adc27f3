"""GH211: capability: managed memory."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.checks._capability import capability_check

CHECK = capability_check(
    code="GH211",
    what="capability: managed memory",
    why="Oversubscription of HBM allocates managed memory.",
    has=lambda device: device.managed,
    lacking="fail",
    means="leave use_uvm and slab: managed out of the configuration",
)
