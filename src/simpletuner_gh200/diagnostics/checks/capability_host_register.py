"""GH216: capability: registering host memory."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.checks._capability import capability_check

CHECK = capability_check(
    code="GH216",
    what="capability: registering host memory",
    why="Registered slabs are copied to the device asynchronously, without a second pinned copy.",
    has=lambda device: device.host_register,
    lacking="warn",
    means="batches are copied through torch's own pinned buffers; slower, not wrong",
)
