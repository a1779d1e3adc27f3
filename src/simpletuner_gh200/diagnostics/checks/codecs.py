"""GH106: can the codecs that the datasets ask for be used?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, warned
from simpletuner_gh200.diagnostics.context import Context

_LIBRARIES = {"lz4": ("lz4",), "snappy": ("cramjam", "snappy"), "zstd": ("zstandard", "zstd"), "zlib": ("zlib",)}
_BUILT_IN = {"zlib"}


def _run(context: Context) -> Finding:
    missing = {
        codec
        for codec, modules in _LIBRARIES.items()
        if codec not in _BUILT_IN and not any(context.package(module) for module in modules)
    }
    wanted = {block.compression for _id, _folder, block in context.training.in_memory()} if context.training else set()
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
