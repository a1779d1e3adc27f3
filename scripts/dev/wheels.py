#!/usr/bin/env python3
"""``make wheels``: a wheel with the C code built for x86-64 and one for aarch64, into dist/, and the latter tried.

The aarch64 one is compiled by Debian's cross compiler. Under qemu-user its libraries are loaded and ``gh200 --help``
runs, with an aarch64 Python from Debian and the wheels that our dependencies have for it. No torch is involved.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import check_aarch64
from environments import uv_command, without_find_links

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
WORK = ROOT / ".cache" / "aarch64"
PYTHON = "3.11"
"""Debian 12's own."""
DEBIAN_PACKAGES = (
    *(f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "libssl3", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5"),
    *("libuuid1", "libsqlite3-0", "libcrypt1"),
)
LOAD = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]; print('loaded', len(sys.argv) - 1)"


def main() -> int:
    if not check_aarch64.tools_present():
        return 1
    native = build(os.environ.get("CC", "cc"))
    cross = build(check_aarch64.COMPILER)
    print(f"built {native.relative_to(ROOT)} and {cross.relative_to(ROOT)}")
    return 0 if runs_under_qemu(cross) else 1


def build(compiler: str) -> Path:
    uv = uv_command()
    target, environment = str(DIST), {**without_find_links(), "GH200_BUILD_ALLOCATOR": "1", "CC": compiler}
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", target, str(ROOT)]
    command = [uv, "build", "--wheel", "--quiet", "--out-dir", target, str(ROOT)] if uv else pip
    subprocess.run(command, env=environment, check=True)
    return max(DIST.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def runs_under_qemu(wheel: Path) -> bool:
    """Its libraries load and its command starts in a Python of that machine."""
    machine, site = debian_python(), WORK / "site"
    shutil.rmtree(site, ignore_errors=True)
    install(wheel, site)
    libraries = sorted(str(path) for path in (site / "simpletuner_gh200").rglob("_*.so"))
    python = [check_aarch64.EMULATOR, "-L", str(machine), str(machine / "usr" / "bin" / f"python{PYTHON}")]
    environment = {"PATH": os.environ["PATH"], "HOME": str(WORK), "PYTHONPATH": str(site), "TERM": "dumb"}
    environment["PYTHONHOME"] = str(machine / "usr")
    tries = {
        "libraries": [*python, "-c", LOAD, *libraries],
        "gh200 --help": [*python, "-m", "simpletuner_gh200", "--help"],
    }
    wanted = {"libraries": f"loaded {len(expected_libraries(wheel))}", "gh200 --help": "train"}
    good = True
    for name, command in tries.items():
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        fine = ran.returncode == 0 and wanted[name] in ran.stdout
        print(f"aarch64 under qemu, {name}: {'ok' if fine else ran.stderr.strip()[-400:] or ran.stdout[-400:]}")
        good = good and fine
    return good


def expected_libraries(wheel: Path) -> list[str]:
    """One for every C file that lies in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".c")]


def install(wheel: Path, site: Path) -> None:
    uv = uv_command()
    assert uv is not None, "uv is needed to install for another machine"
    command = [uv, "pip", "install", "--quiet", "--target", str(site), "--python-version", PYTHON]
    command += ["--python-platform", "aarch64-manylinux_2_36", "--only-binary", ":all:", str(wheel)]
    subprocess.run(command, env=without_find_links(), check=True)


def debian_python() -> Path:
    """The root folder of an aarch64 Debian with Python in it, unpacked from its packages; nothing is installed."""
    machine = WORK / "root"
    if (machine / "usr" / "bin" / f"python{PYTHON}").is_file():
        return machine
    state, debs = WORK / "apt", WORK / "debs"
    for folder in (state / "lists" / "partial", state / "archives" / "partial", debs, machine):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = ["APT::Architecture=arm64", "APT::Architectures=arm64", f"Dir::State={state}", f"Dir::Cache={state}"]
    options += [f"Dir::State::status={state / 'status'}", "APT::Sandbox::User=root"]
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    subprocess.run([*apt, "update"], check=True, stdout=sys.stderr)
    subprocess.run([*apt, "download", *DEBIAN_PACKAGES], check=True, cwd=debs, stdout=sys.stderr)
    for package in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(machine)], check=True)
    return machine


if __name__ == "__main__":
    sys.exit(main())
