"""Our C code as shared libraries: those shipped with the package, or compiled here on first use.

What is compiled goes to a directory of the user's own, never to a shared temporary folder, from which another user
could have a library of his loaded instead.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.config.environment import cache_folder
from simpletuner_gh200.errors import FeatureUnavailable

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC")
LIBRARIES = ("-ldl", "-lpthread")


@dataclass(frozen=True)
class CSource:
    """One C file of the package, and what to say where it can't be built."""

    path: Path
    wanted_by: str
    otherwise: str
    """What can be done instead of installing a compiler."""

    @property
    def shipped(self) -> Path:
        return self.path.with_name(f"_{self.path.stem}.so")

    def library(self) -> Path:
        """Path of the built library. Raises FeatureUnavailable where it can't be built."""
        if self.shipped.exists():
            return self.shipped
        target = private_folder() / f"{self.path.stem}-{self._digest()}.so"
        if not target.exists():
            self.compile_to(target)
        return target

    def compile_to(self, target: Path) -> None:
        """Build next to ``target`` and move it there in one step: ranks starting together must not see half of it."""
        compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
        if compiler is None:
            raise FeatureUnavailable(
                f"{self.wanted_by} needs a C compiler, and none of {', '.join(COMPILERS)} is on the PATH",
                remedy=f"install gcc, or {self.otherwise}",
            )
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            fresh = Path(work) / target.name
            command = [compiler, *FLAGS, "-o", str(fresh), str(self.path), *LIBRARIES]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode != 0:
                raise FeatureUnavailable(
                    f"{compiler} could not build {self.path.name} for {self.wanted_by}: {done.stderr.strip()[-500:]}",
                    remedy=f"install the C library's headers (gcc and libc6-dev), or {self.otherwise}",
                )
            with fresh.open("rb") as built:
                os.fsync(built.fileno())  # or a power cut could leave an empty library under a name that is trusted
            os.replace(fresh, target)

    def _digest(self) -> str:
        circumstances = " ".join((*FLAGS, sysconfig.get_platform(), *platform.libc_ver()))
        headers = b"".join(header.read_bytes() for header in sorted(self.path.parent.glob("*.h")))
        return hashlib.sha256(self.path.read_bytes() + headers + circumstances.encode()).hexdigest()[:16]


def private_folder() -> Path:
    """Our cache directory: the user's, and nobody else's to write."""
    remedy = "set XDG_CACHE_HOME to a folder of your own"
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError) as refused:  # the latter where the user has no home
        raise FeatureUnavailable(f"there is no folder for what is compiled: {refused}", remedy=remedy) from refused
    if status.st_uid != os.getuid():
        raise FeatureUnavailable(f"{folder} belongs to user {status.st_uid}, not to us", remedy=remedy)
    if status.st_mode & 0o077:
        folder.chmod(0o700)
        for library in folder.glob("*.so"):  # anybody may have put them there
            library.unlink()
    return folder
