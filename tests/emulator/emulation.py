"""Building the emulated driver, and steering it from a test that runs on it.

``libcuda.so.1`` is loaded by path; since its SONAME is the real one's, NVIDIA's bindings then get it from the loader.
That has to happen in a process of its own: a torch in the same process would find it too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = sorted((HERE / "csrc").glob("*.[ch]"))

PERSONALITIES = ("gh200", "cdmm", "gb10", "pcie", "legacy")


def build() -> Path:
    """Compile the driver once per version of its sources."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    folder = ROOT / ".cache" / "emulator" / digest
    library = folder / "libcuda.so.1"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        fresh = Path(work) / library.name
        units = [str(source) for source in SOURCES if source.suffix == ".c"]
        flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(
            ["gcc", *flags, "-Wl,-soname,libcuda.so.1", "-o", str(fresh), *units, "-ldl", "-lpthread"], check=True
        )
        os.replace(fresh, library)
    return library


def cuda12_site() -> Path:
    """Where scripts/dev/setup_cuda12_bindings.sh puts the bindings of the other major."""
    return ROOT / ".cache" / f"cuda12-{sys.version_info.major}.{sys.version_info.minor}"


def environment(*, cuda12: bool = False, **emulation: str) -> dict[str, str]:
    """For a child process that runs on the emulated driver; ``personality="pcie"`` sets GH200_EMU_PERSONALITY."""
    wanted = {**os.environ, "GH200_EMULATED": "1", "GH200_EMU_LIBRARY": str(build())}
    wanted.pop("PYTHONDONTWRITEBYTECODE", None)
    wanted["LD_LIBRARY_PATH"] = f"{build().parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    if cuda12:
        wanted["PYTHONPATH"] = str(cuda12_site())
    return wanted | {f"GH200_EMU_{key.upper()}": value for key, value in emulation.items()}


class Emulator:
    """The control functions beside the driver's own."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["GH200_EMU_LIBRARY"])
        for name in ("emu_calls", "emu_counter", "emu_streams", "emu_events"):
            getattr(self._library, name).restype = ctypes.c_ulong
        self._library.emu_set_hbm.argtypes = (ctypes.c_size_t,)
        self._library.emu_residency.argtypes = (ctypes.c_size_t,)
        self._library.emu_touch.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)

    def become(self, personality: str) -> None:
        assert self._library.emu_become(personality.encode()), personality

    def set_hbm(self, size: int) -> None:
        self._library.emu_set_hbm(size)

    def fail(self, call: str, nth: int, code: int) -> None:
        self._library.emu_fail(call.encode(), nth, code)

    def heal(self) -> None:
        self._library.emu_fail(b"", 0, 0)
        if not self.held()["managed"]:
            self._library.emu_forget()
        self._library.emu_lie(0)
        self._library.emu_defer(0)

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
        kinds = {name: self.counter(name) for name in ("managed", "device", "registered")}
        return kinds | {"streams": int(self._library.emu_streams()), "events": int(self._library.emu_events())}

    def context_depth(self) -> int:
        return int(self._library.emu_context_depth())
