"""GH106: can the codecs that the datasets ask for be used?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.store.codecs import PACKAGES


def _run(context: Context) -> Finding:
    missing = {codec for codec, package in PACKAGES.items() if not context.package(package)}
    blocks = [block for _id, _folder, block in context.training.in_memory()] if context.training else []
    wanted = {"lz4" if block.compression == "auto" else block.compression for block in blocks}
    if missing & wanted:
        names = ", ".join(sorted(missing & {name for name in wanted if name}))
        return failed(f"asked for, and no library here has it: {names}", "pip install 'simpletuner-gh200[codecs]'")
    if missing:
        return warned(f"no library for: {', '.join(sorted(missing))}", "pip install 'simpletuner-gh200[codecs]'")
    return passed("lz4, snappy, zstd, zlib")


CHECK = Check(
    code="GH106",
    what="codec libraries",
    why="A dataset whose compression has no library here can't be staged.",
    run=_run,
)
