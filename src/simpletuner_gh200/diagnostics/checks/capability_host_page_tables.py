"""GH214: capability: the CPU's page tables are the GPU's."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.checks._capability import capability_check

CHECK = capability_check(
    code="GH214",
    what="capability: the CPU's page tables are the GPU's",
    why="Hardware translation (ATS); without it advice on plain host memory does nothing.",
    has=lambda device: device.host_page_tables,
    lacking="warn",
    means="placement hints on system memory stay off; slabs are registered instead",
)
