#!/usr/bin/env python3
"""aarch64 is the product's CPU: every dependency must have a wheel for it, and our C code must run on it.

The wheels are resolved for aarch64 with source builds forbidden: ours, and SimpleTuner's with CUDA at the versions that
`gh200 setup` installs, less the few packages that come as source everywhere or on aarch64. The C code is cross-compiled
and run under qemu-user, both from Debian's packages (install_test_programs.sh).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from environments import without_find_links

from simpletuner_gh200.upstream.tested import TESTED, Tested, constraints, tested_versions

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "aarch64-manylinux_2_28"
SIMPLETUNERS_PLATFORM = "aarch64-manylinux_2_39"
"""Ubuntu 24.04's: trainingsample's and webshart's wheels for aarch64 ask for its C library."""
PURE = ("atomicwrites", "deepspeed", "docopt", "iterutils", "mup", "rouge-score", "sqlitedict", "word2number")
"""Python alone, and published as source only."""
COMPILED = {"praat-parselmouth": "C++", "sphn": "Rust"}
"""No wheel for aarch64 in any version: built where they are installed."""
COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
PACKAGE = ROOT / "src" / "simpletuner_gh200"
ALLOCATOR = PACKAGE / "memory" / "pool" / "allocator.c"
FILES = PACKAGE / "held" / "bulk.c"
TESTS = ROOT / "tests" / "emulator"


def main() -> int:
    failures = [f"wheels for Python {python}" for python in PYTHONS if not wheels_exist(python)]
    shipped = [(each, python) for each in TESTED if "aarch64" in each.machines for python in each.pythons]
    failures += [
        f"SimpleTuner {each.release} on Python {py}" for each, py in shipped if not simpletuner_resolves(each, py)
    ]
    if not tools_present():
        failures.append("C code (no cross compiler)")
    elif not c_code_runs():
        failures.append("C code")
    good = "aarch64: our dependencies have wheels, SimpleTuner's resolve as shipped, our C code runs"
    print("FAILED: " + "; ".join(failures) if failures else good)
    return 1 if failures else 0


def wheels_exist(python: str) -> bool:
    found = resolve([str(ROOT / "pyproject.toml"), "--all-extras"], python, PLATFORM)
    print(f"Python {python}: {len(found)} packages, all with wheels")
    return bool(found)


def simpletuner_resolves(tested: Tested, python: str) -> bool:
    """With CUDA, at exactly the versions that are shipped, each of which has a wheel for aarch64 or is named above."""
    with tempfile.TemporaryDirectory() as work:
        wanted, pins = Path(work, "wanted.in"), Path(work, "pins.txt")
        wanted.write_text(tested.requirement(cpu=False) + "\n")
        pins.write_text(constraints(tested.release))
        sources = [word for name in (*PURE, *COMPILED) for word in ("--no-binary", name)]
        found = resolve([str(wanted), "-c", str(pins), *sources], python, SIMPLETUNERS_PLATFORM)
    unpinned = sorted(found.items() - tested_versions(tested.release).items())
    compiled = ", ".join(f"{name} ({language})" for name, language in COMPILED.items() if name in found)
    print(
        f"{tested.requirement(cpu=False)}, Python {python}: {len(found)} packages; to be compiled: {compiled or 'none'}"
    )
    print(f"  not pinned: {unpinned}" if unpinned else "  every version as shipped")
    return bool(found) and not unpinned


def resolve(words: list[str], python: str, platform: str) -> dict[str, str]:
    """Versions by name; nothing, after uv's own words, where there is no solution."""
    command = [str(ROOT / ".uv" / "bin" / "uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate", *words]
    command += ["--python-version", python, "--python-platform", platform, "--only-binary", ":all:"]
    ran = subprocess.run(command, env=without_find_links(), capture_output=True, text=True, cwd=ROOT)
    if ran.returncode:
        print(ran.stderr)
        return {}
    lines = (line.partition(";")[0].strip() for line in ran.stdout.splitlines())
    return dict(line.split("==") for line in lines if "==" in line)


def tools_present() -> bool:
    """Installed where they are missing, or named."""
    install = ROOT / "scripts" / "dev" / "install_test_programs.sh"
    return subprocess.run(["sh", str(install), COMPILER, EMULATOR]).returncode == 0


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
