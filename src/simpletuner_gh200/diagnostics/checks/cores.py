"""GH311: cores against the staging workers that are asked for."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, passed, warned
from simpletuner_gh200.diagnostics.context import Context


def _run(context: Context) -> Finding:
    cores = context.cores
    asked = (
        {name: block.num_workers for name, _folder, block in context.training.in_memory()} if context.training else {}
    )
    over = {name: workers for name, workers in asked.items() if workers and workers > cores}
    if over:
        shown = ", ".join(f"{name}: {workers}" for name, workers in over.items())
        return warned(
            f"{cores} cores may be used; num_workers asks for more ({shown})",
            f"set num_workers to {cores}, or leave it out; or give the container more CPUs",
        )
    return passed(f"{cores} cores may be used")


CHECK = Check(
    code="GH311",
    what="cores and staging workers",
    why="More workers than cores only take turns. A container's CPU quota counts, not what nproc of the host says.",
    run=_run,
)
