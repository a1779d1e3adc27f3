#!/usr/bin/env python3
"""aarch64 is the product's CPU: every dependency must have a wheel for it, and our C code must run on it.

The wheels are resolved for aarch64 with source builds forbidden. The C code is cross-compiled and run under qemu-user,
both from Debian's packages; as root on a Debian machine they are installed if they are missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "aarch64-manylinux_2_28"
COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
PACKAGES = ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user")
PACKAGE = ROOT / "src" / "simpletuner_gh200"
ALLOCATOR = PACKAGE / "memory" / "pool" / "allocator.c"
FILES = PACKAGE / "store" / "files.c"
TESTS = ROOT / "tests" / "emulator"


def main() -> int:
    failures = [f"wheels for Python {python}" for python in PYTHONS if not wheels_exist(python)]
    if not tools_present():
        print(f"NOT CHECKED: C code; install {', '.join(PACKAGES)}")
        failures.append("C code (no cross compiler)")
    elif not c_code_runs():
        failures.append("C code")
    print("FAILED: " + "; ".join(failures) if failures else "aarch64: every dependency has a wheel, our C code runs")
    return 1 if failures else 0


def wheels_exist(python: str) -> bool:
    command = [
        str(ROOT / ".uv" / "bin" / "uv"),
        "pip",
        "compile",
        "--quiet",
        str(ROOT / "pyproject.toml"),
        "--all-extras",
    ]
    command += ["--python-version", python, "--python-platform", PLATFORM, "--only-binary", ":all:", "--no-header"]
    environment = {key: value for key, value in os.environ.items() if key != "PIP_FIND_LINKS"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    found = [line for line in ran.stdout.splitlines() if "==" in line and not line.lstrip().startswith("#")]
    print(f"Python {python}: {len(found)} packages, all with wheels" if ran.returncode == 0 else ran.stderr)
    return ran.returncode == 0


def tools_present() -> bool:
    if shutil.which(COMPILER) and shutil.which(EMULATOR):
        return True
    if os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], stdout=subprocess.DEVNULL)
        subprocess.run(["apt-get", "install", "-y", "-qq", *PACKAGES], stdout=subprocess.DEVNULL)
    return bool(shutil.which(COMPILER) and shutil.which(EMULATOR))


def c_code_runs() -> bool:
    with tempfile.TemporaryDirectory() as work:
        driver = Path(work, "libcuda.so.1")
        units = [str(path) for path in sorted((TESTS / "csrc").glob("*.c"))]
        shared = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([COMPILER, *shared, "-o", str(driver), *units, "-ldl", "-lpthread"], check=True)
        data = Path(work, "data")
        data.mkdir()
        return all((runs(work, "run_pool.c", ALLOCATOR, driver), runs(work, "run_files.c", FILES, data)))


def runs(work: str, main: str, source: Path, argument: Path) -> bool:
    program = Path(work, Path(main).stem)
    sources = [str(TESTS / "aarch64" / main), str(source)]
    compile_ = [COMPILER, "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-o", str(program), *sources, "-ldl", "-lpthread"]
    subprocess.run(compile_, check=True)
    command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(program), str(argument)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=work)
    print(f"{source.name} on aarch64 under qemu: {(ran.stdout + ran.stderr).strip()}")
    return ran.returncode == 0 and ran.stdout.strip() == "ok"


if __name__ == "__main__":
    sys.exit(main())
