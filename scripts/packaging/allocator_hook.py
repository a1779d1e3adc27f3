"""Build hook: with GH200_BUILD_ALLOCATOR=1 a wheel carries our C code built, and a platform's tag.

Without it the wheel is pure Python and what is needed is compiled on first use. Opt-in, because a library built here
needs a C library at least as new as ours.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("memory/pool/allocator.c", "store/files.c", "cache/tensor_files.c")


class AllocatorHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("GH200_BUILD_ALLOCATOR") != "1" or version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
        compiler = os.environ.get("CC", "cc")
        for name in SOURCES:
            source = Path(self.root) / "src" / "simpletuner_gh200" / name
            built = Path(self._folder.name) / f"_{source.stem}.so"
            subprocess.run([compiler, *flags, "-o", str(built), str(source), "-ldl", "-lpthread"], check=True)
            build_data["force_include"][str(built)] = f"simpletuner_gh200/{Path(name).parent}/{built.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
