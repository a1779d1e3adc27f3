"""GH307: may this process lock the memory that it registers with the driver?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.units import GIB, format_bytes

_FIX = "docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK; else /etc/security/limits.conf"


def _run(context: Context) -> Finding:
    limit = context.limit("Max locked memory")
    if limit is None:
        return passed("unlimited")
    shown = f"{format_bytes(limit)} may be locked"
    if limit >= 8 * GIB:
        return warned(f"{shown}; slabs beyond that can't be registered", _FIX)
    return failed(shown, _FIX) if context.nvidia_gpus or context.has_device else warned(shown, _FIX)


CHECK = Check(
    code="GH307",
    what="limit on locked memory",
    why="Slabs that the GPU copies from, and NCCL's buffers, are locked; containers often allow 64 KiB to 8 MiB.",
    run=_run,
)
