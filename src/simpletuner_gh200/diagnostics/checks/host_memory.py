"""GH305: how much host memory a run may take, and what the free column hides."""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.units import GIB, format_bytes

LITTLE = 2 * GIB
"""Below this not even the demo's caches and torch fit together."""
SHARE = 0.25


def _run(context: Context) -> Finding:
    memory = host_memory(context.root)
    shown = (
        f"{format_bytes(memory.available)} can be taken of {format_bytes(memory.total)} (bounded by {memory.limit}); "
        f"MemFree is {format_bytes(memory.free)}, the rest is page cache that makes way"
    )
    if memory.available < LITTLE:
        return failed(shown, "end other programs, or raise the container's memory limit (docker run --memory)")
    if memory.available < SHARE * memory.total:
        return warned(shown, "see what holds the rest: ps aux --sort=-rss | head, and ls -l /dev/shm")
    return passed(shown)


CHECK = Check(
    code="GH305",
    what="host memory that is available",
    why="Datasets and caches are held in it. MemFree is not the measure: the page cache makes way; the cgroup doesn't.",
    run=_run,
)
