"""GH404: do the in-memory datasets fit their ceilings and this machine?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped
from simpletuner_gh200.diagnostics.context import Context, folder_bytes
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.units import format_bytes, gib_to_bytes


def _run(context: Context) -> Finding:
    if context.training is None:
        return skipped("no configuration was given")
    wanted = [entry for entry in context.training.in_memory() if entry[1].is_dir()]
    if not wanted:
        return skipped("no in-memory dataset in it")
    sizes = {name: folder_bytes(folder) for name, folder, _block in wanted}
    over = [
        f"{name}: {format_bytes(sizes[name])} over its memory_limit_gb of {block.memory_limit_gb:g}"
        for name, _folder, block in wanted
        if block.memory_limit_gb is not None and sizes[name] > gib_to_bytes(block.memory_limit_gb)
    ]
    if over:
        return failed(
            "; ".join(over),
            "raise memory_limit_gb, or leave files out with file_extensions; compression helps captions, not JPEG",
        )
    available, total = host_memory(context.root).available, sum(sizes.values())
    shown = f"{format_bytes(total)} of files, {format_bytes(available)} of memory available"
    if total > available:
        return failed(shown, "hold fewer datasets in memory, or use a machine or container limit with more")
    return passed(shown)


CHECK = Check(
    code="GH404",
    what="in-memory datasets against memory",
    why="A dataset that doesn't fit is refused when the run starts; better to know before.",
    run=_run,
)
