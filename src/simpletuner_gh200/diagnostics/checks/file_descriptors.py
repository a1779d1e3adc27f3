"""GH308: enough file descriptors?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, warned
from simpletuner_gh200.diagnostics.context import Context

LEAST = 1024
GOOD = 16384
_FIX = "ulimit -n 65536, or docker run --ulimit nofile=65536:65536"


def _run(context: Context) -> Finding:
    limit = context.limit("Max open files")
    if limit is None or limit >= GOOD:
        return passed("unlimited" if limit is None else f"{limit}")
    if limit < LEAST:
        return failed(f"{limit} files may be open at once", _FIX)
    return warned(f"{limit} files may be open at once; staging with many workers wants {GOOD}", _FIX)


CHECK = Check(
    code="GH308",
    what="limit on open files",
    why="Staging workers, shared slabs, sockets between ranks and SimpleTuner's own readers each hold some open.",
    run=_run,
)
