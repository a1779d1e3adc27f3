"""Build hook: with GH200_BUILD_ALLOCATOR=1 a wheel carries the pool's C allocator built, and a platform's tag.

Without it the wheel is pure Python and the allocator is compiled on first use. Opt-in, because a library built here
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

FOLDER = "src/simpletuner_gh200/memory/pool"


class AllocatorHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("GH200_BUILD_ALLOCATOR") != "1" or version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        built = Path(self._folder.name) / "_allocator.so"
        source = Path(self.root) / FOLDER / "allocator.c"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, *flags, "-o", str(built), str(source), "-ldl", "-lpthread"], check=True)
        build_data["force_include"][str(built)] = "simpletuner_gh200/memory/pool/_allocator.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
