"""Folders, images and memory figures for the tests of what is held."""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.held import listing, stager
from simpletuner_gh200.held.files import HeldFiles
from simpletuner_gh200.held.image_check import image_formats
from simpletuner_gh200.held.staging import stage
from simpletuner_gh200.held.staging_report import StagingReport
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.units import GIB

ROOT = Path(__file__).resolve().parents[3]


def image(kind: str = "PNG", size: int = 16, shade: int = 7) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (size, size), (shade, 40, 200)).save(out, kind)
    return out.getvalue()


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def roomy() -> HostMemory:
    return HostMemory(total=64 * GIB, free=32 * GIB, available=32 * GIB, limit="MemAvailable")


def staged(folder: Path, **settings: object) -> tuple[HeldFiles, StagingReport]:
    chosen = InMemorySettings.model_validate({"num_workers": 2, "max_corruption_rate": 1.0, **settings})
    segment, report = stage(folder, chosen, host=roomy)
    return HeldFiles.alone(segment), report


def staged_alone(folder: Path, *, native: bool = True, **settings: object) -> dict[str, int]:
    """Staging in a process of its own, of which nothing is used up or in pieces yet: by how many bytes it grew, and
    what it found. Without ``native`` the C code is left out.
    """
    job = {"folder": str(folder), "native": native, "settings": settings}
    code = "from tests.unit.held import held_samples; held_samples.measure()"
    ran = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(job), cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True
    )
    return json.loads(ran.stdout)


def measure() -> None:
    """The other side of ``staged_alone``."""
    job = json.load(sys.stdin)
    if not job["native"]:
        stager.library_if_any = listing.library_if_any = lambda: None
    image_formats()  # Pillow's plug-ins are not what is measured
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _dataset, report = staged(Path(job["folder"]), **job["settings"])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps({"grown": grown, "broken": report.problems.broken, "checked": report.images_checked}))


def in_child(work: Callable[[], object]) -> bool:
    """Does a forked child find it true? It has twenty seconds."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def open_memfds() -> int:
    """How many memfds of ours this process holds, those of earlier tests collected first."""
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:gh200" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found
