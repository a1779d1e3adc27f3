"""GH310: transparent huge pages."""

from __future__ import annotations

import re

from simpletuner_gh200.diagnostics.check import Check, Finding, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context

_FOLDER = "sys/kernel/mm/transparent_hugepage"


def _run(context: Context) -> Finding:
    mode = _chosen(context.read(f"{_FOLDER}/enabled"))
    if mode is None:
        return skipped("the kernel has no transparent huge pages")
    shared = _chosen(context.read(f"{_FOLDER}/shmem_enabled")) or "not available"
    shown = f"anonymous memory: {mode}; shared memory: {shared}"
    if mode == "never":
        return warned(shown, f"echo madvise > /{_FOLDER}/enabled as root: large slabs then cost far fewer page faults")
    return passed(shown)


def _chosen(text: str | None) -> str | None:
    """``always [madvise] never`` -> ``madvise``"""
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


CHECK = Check(
    code="GH310",
    what="huge pages",
    why="The first touch of fresh small pages, not reading, is what limits how fast a dataset is staged.",
    run=_run,
)
