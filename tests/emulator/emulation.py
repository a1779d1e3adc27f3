"""Building the emulated driver (and a CUDA runtime over it), and steering it from a test that runs on it.

``libcuda.so.1`` is loaded by path; since its SONAME is the real one's, NVIDIA's bindings then get it from the loader.
That has to happen in a process of its own: a torch in the same process would find it too.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = sorted((HERE / "csrc").glob("*.[ch]"))
RUNTIME_SOURCE = HERE / "cudart" / "cudart.c"
FLAGS = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")

PERSONALITIES = ("gh200", "cdmm", "gb10", "pcie", "hmm", "legacy")


def build() -> Path:
    """Compile the driver once per version of its sources."""
    folder = _folder(*SOURCES)
    library = folder / "libcuda.so.1"
    if not library.exists():
        units = [str(source) for source in SOURCES if source.suffix == ".c"]
        _compile(library, [*FLAGS, "-Wl,-soname,libcuda.so.1", *units, "-ldl", "-lpthread"])
    return library


def installed_runtime() -> Path | None:
    """The CUDA runtime that the installed torch links to; None where torch is a CPU build."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    site = Path(found.origin).parent.parent
    return next(iter(sorted(site.glob("nvidia/*/lib/libcudart.so.[0-9]*"))), None)


def build_runtime(real: Path) -> Path:
    """A runtime with the real one's name and symbols: ours where we wrote them, refusing stubs for the rest."""
    library = _folder(*SOURCES, RUNTIME_SOURCE) / real.name
    if library.exists():
        return library
    major = real.name.rsplit(".", 1)[-1]
    with tempfile.TemporaryDirectory() as work:
        stubs, versions = Path(work) / "stubs.c", Path(work) / "versions.map"
        stubs.write_text(_stubs(real))
        # torch asks for its symbols by version.
        versions.write_text(f"libcudart.so.{major} {{ global: cuda*; __cuda*; local: *; }};\n")
        # Stubs have no parameters, whatever the real function takes: the caller's convention allows that.
        options = [f"-DRUNTIME_VERSION={major}000", "-Wno-builtin-declaration-mismatch", f"-Wl,-soname,{real.name}"]
        units = [str(RUNTIME_SOURCE), str(stubs), str(build())]
        _compile(library, [*FLAGS, *options, f"-Wl,--version-script={versions}", *units, "-ldl"])
    return library


def _stubs(real: Path) -> str:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(real)], check=True, capture_output=True, text=True
    ).stdout
    exported = {line.split()[-1].split("@")[0] for line in listed.splitlines()}
    written = set(re.findall(r"\b((?:__)?cuda\w+)\(", RUNTIME_SOURCE.read_text()))
    names = sorted(name for name in exported - written if re.match(r"(__)?cuda[A-Z]", name))
    lines = (f'int {name}(void) {{ return emu_unsupported("{name}"); }}' for name in names)
    return "\n".join(("extern int emu_unsupported(const char *);", *lines, ""))


def _folder(*sources: Path) -> Path:
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    return ROOT / ".cache" / "emulator" / digest


def _compile(library: Path, arguments: list[str]) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        fresh = Path(work) / library.name
        subprocess.run(["gcc", "-o", str(fresh), *arguments], check=True)
        os.replace(fresh, library)


def cuda12_site() -> Path:
    """Where scripts/dev/environments.py puts the bindings of the other major."""
    return ROOT / ".cache" / f"cuda12-python{sys.version_info.major}.{sys.version_info.minor}"


def environment(*, cuda12: bool = False, torch_runtime: Path | None = None, **emulation: str) -> dict[str, str]:
    """For a child process that runs on the emulated driver; ``personality="pcie"`` sets GH200_EMU_PERSONALITY.

    ``torch_runtime`` is the runtime to stand in for; preloaded, because torch finds its own by RPATH.
    """
    wanted = {**os.environ, "GH200_EMULATED": "1", "GH200_EMU_LIBRARY": str(build())}
    wanted.pop("PYTHONDONTWRITEBYTECODE", None)
    wanted["LD_LIBRARY_PATH"] = f"{build().parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    if cuda12:
        wanted["PYTHONPATH"] = os.pathsep.join(filter(None, (str(cuda12_site()), os.environ.get("PYTHONPATH"))))
    if torch_runtime is not None:
        wanted["LD_PRELOAD"] = str(build_runtime(torch_runtime))
    return wanted | {f"GH200_EMU_{key.upper()}": value for key, value in emulation.items()}


KINDS = ("managed", "device", "registered", "pinned", "mapped", "handles", "ranges")


class Emulator:
    """The control functions beside the driver's own."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["GH200_EMU_LIBRARY"])
        for name in ("emu_calls", "emu_counter", "emu_streams", "emu_events"):
            getattr(self._library, name).restype = ctypes.c_ulong
        self._library.emu_set_hbm.argtypes = (ctypes.c_size_t,)
        self._library.emu_set_grace.argtypes = (ctypes.c_size_t,)
        self._library.emu_residency.argtypes = (ctypes.c_size_t,)
        self._library.emu_touch.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)

    def become(self, personality: str) -> None:
        assert self._library.emu_become(personality.encode()), personality

    def set_hbm(self, size: int) -> None:
        self._library.emu_set_hbm(size)

    def set_grace(self, size: int) -> None:
        """Host memory that the driver can pin or map in all; 0: without an end."""
        self._library.emu_set_grace(size)

    def fail(self, call: str, nth: int, code: int) -> None:
        self._library.emu_fail(call.encode(), nth, code)

    def heal(self) -> None:
        self._library.emu_fail(b"", 0, 0)
        if not self.held()["managed"]:
            self._library.emu_forget()
        self._library.emu_lie(0)
        self._library.emu_defer(0)
        self._library.emu_set_grace(0)

    def lie(self) -> None:
        """Accept advice and prefetches without recording them."""
        self._library.emu_lie(1)

    def defer(self) -> None:
        """Queue the work of streams until somebody waits for it."""
        self._library.emu_defer(1)

    def calls(self, name: str) -> int:
        return int(self._library.emu_calls(name.encode()))

    def counter(self, name: str) -> int:
        return int(self._library.emu_counter(name.encode()))

    def residency(self, address: int) -> int:
        """-1: host, 0 and up: that device."""
        return int(self._library.emu_residency(address))

    def touch(self, address: int, size: int, who: int) -> None:
        self._library.emu_touch(address, size, who)

    def held(self) -> dict[str, int]:
        """What is allocated, registered and open right now."""
        kinds = {name: self.counter(name) for name in KINDS}
        return kinds | {"streams": int(self._library.emu_streams()), "events": int(self._library.emu_events())}

    def context_depth(self) -> int:
        return int(self._library.emu_context_depth())
