"""The allocator's shared library: the one shipped with the package, or one compiled here on first use.

What is compiled goes to a directory of the user's own, never to a shared temporary folder, from which another user
could have a library of his loaded instead.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from simpletuner_gh200.errors import FeatureUnavailable

SOURCE = Path(__file__).with_name("allocator.c")
SHIPPED = Path(__file__).with_name("_allocator.so")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC")


def library() -> Path:
    """Path of the built allocator. Raises FeatureUnavailable where it can't be built."""
    if SHIPPED.exists():
        return SHIPPED
    target = private_folder() / f"allocator-{_digest()}.so"
    if not target.exists():
        compile_to(target)
    return target


def private_folder() -> Path:
    """Our cache directory: the user's, and nobody else's to write."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "simpletuner-gh200"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise FeatureUnavailable(
            f"{folder} belongs to user {status.st_uid}, not to us", remedy="set XDG_CACHE_HOME to a folder of your own"
        )
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def compile_to(target: Path) -> None:
    """Build next to ``target`` and move it there in one step, so that ranks starting together can't see half of it."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise FeatureUnavailable(
            f"use_uvm needs a C compiler to build its allocator, and none of {', '.join(COMPILERS)} is on the PATH",
            remedy="install gcc, or install a wheel of simpletuner-gh200 that has the allocator built in",
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        fresh = Path(work) / target.name
        command = [compiler, *FLAGS, "-o", str(fresh), str(SOURCE), "-ldl", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise FeatureUnavailable(
                f"{compiler} could not build the allocator: {done.stderr.strip()[-500:]}",
                remedy="install the C library's headers (gcc and libc6-dev), or set use_uvm to false",
            )
        os.replace(fresh, target)


def _digest() -> str:
    built_from = SOURCE.read_bytes() + " ".join((*FLAGS, sysconfig.get_platform())).encode()
    return hashlib.sha256(built_from).hexdigest()[:16]
