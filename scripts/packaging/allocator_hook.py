"""Build hook: with GH200_BUILD_ALLOCATOR=1 a wheel carries our C code built, and a platform's tag.

Without it the wheel is pure Python and what is needed is compiled on first use. The tag says which C library the built
code needs at least, as its symbols tell. CC names the compiler; it may be one for another machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC")
OLDEST_GLIBC = 17
"""2.17: no installer knows a tag for anything older."""


class AllocatorHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("GH200_BUILD_ALLOCATOR") != "1" or version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        compiler = os.environ.get("CC", "cc")
        package = Path(self.root) / "src" / "simpletuner_gh200"
        libraries = []
        for source in c_sources(package):
            built = Path(self._folder.name) / f"_{source.stem}.so"
            subprocess.run([compiler, *FLAGS, "-o", str(built), str(source), "-ldl", "-lpthread"], check=True)
            build_data["force_include"][str(built)] = str(
                Path("simpletuner_gh200") / source.parent.relative_to(package) / built.name
            )
            libraries.append(built.read_bytes())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{glibc_minor(libraries)}_{machine_of(compiler)}"


def c_sources(package: Path) -> list[Path]:
    """Every C file of the package: each is one library."""
    return sorted(package.rglob("*.c"))


def glibc_minor(libraries: Iterable[bytes]) -> int:
    """The newest C library, as 2.N, that a symbol in them asks for."""
    asked = (int(minor) for library in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", library))
    return max([OLDEST_GLIBC, *asked])


def machine_of(compiler: str) -> str:
    """What the compiler compiles for: x86_64, aarch64."""
    told = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    return told.strip().split("-")[0]
