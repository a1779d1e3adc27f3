"""GH503: copies from the other socket's memory."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, passed, skipped
from simpletuner_gh200.diagnostics.checks._bandwidth import may_not_measure, remote_measured
from simpletuner_gh200.diagnostics.context import Context


def _run(context: Context) -> Finding:
    reason = may_not_measure(context)
    if reason is not None:
        return skipped(reason)
    both = [remote_measured(context, "to device"), remote_measured(context, "to host")]
    shown = [str(found) for found in both if found is not None]
    return passed("; ".join(shown)) if shown else skipped("one CPU memory node: nothing is remote")


CHECK = Check(
    code="GH503",
    what="bandwidth of the remote memory node",
    why="133 GB/s was measured there by others, 2.8 times less than locally: slabs are bound to the GPU's own node.",
    run=_run,
)
